"""The other ranks of a worker's group, and what is done when one ends.

A group is one worker to all other actors: this process leads it and is the only one on the bus.  Where a rank ends, so
does the group.  Of ranks of one host the next group is made of those that are left
(`services.worker.main.WorkerLives`); else this process ends too, and its supervisor begins another.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import structlog

from engine.description.ranks import Place
from engine.loading.rank_adapters import AdapterHeld
from engine.loading.ranks import GroupStart, LeadingRanks, RankModel, RankReady
from engine.loading.stages import StageRanks
from kernels.cpu.binding import abi
from services.worker.groups.rank_processes import RankProcess, Started, StartedRanks
from services.worker.hosts.listening import RankListener
from shared.config import Settings
from shared.errors import FatalError
from shared.ranks.channel import SILENCE, Channel, SilentRankError
from shared.ranks.handshake import group_key

LEAVE_SECONDS = 1.0

log = structlog.get_logger()


class WatchedRanks(LeadingRanks, ABC):
    """Ranks 1 ... ranks - 1.  `failure` says which has ended, and how."""

    def __init__(self, channels: Sequence[Channel], ranks: int, memory: int, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called in a thread, once `failure` is set."""
        super().__init__(channels, memory, ranks)
        self.failure = ""
        self._on_failure = on_failure
        self._leaving = False
        self._sockets: Sequence[socket.socket] = ()  # of links, kept open as long as their descriptors are used

    def joined(self, model: RankModel) -> None:
        super().joined(model)
        for channel in self._channels:
            threading.Thread(target=self._listen, args=(channel,), name=channel.name, daemon=True).start()

    def fail(self, why: str, reason: int = abi.RANK_DIED) -> None:
        """The group ends, unless it is leaving."""
        if self._leaving:
            return
        self.failure = self.failure or why
        self.adapter_orders.end()
        if self.model is not None:
            self.model.end(reason)
        self._on_failure()

    def close(self) -> None:
        self._leaving = True
        if self.model is not None:
            self.model.end()
        self._hang_up()
        self._let_go()

    def _let_go(self) -> None:
        """What no step uses any more."""
        os.close(self.memory)
        for one in self._sockets:
            one.close()

    def _hang_up(self) -> None:
        self.adapter_orders.end()
        for channel in self._channels:
            channel.close()

    def _listen(self, channel: Channel) -> None:
        try:
            while True:
                self.adapter_orders.answered(channel.receive(AdapterHeld, patience=SILENCE))
        except SilentRankError as error:
            log.error("rank_silent", rank=channel.name, reason=str(error))
            self.on_silence(channel)
            self.fail(str(error), abi.RANK_SILENT)
        except FatalError as error:
            self.on_end(channel, error)

    @property
    def may_form_again(self) -> bool:
        """Whether this process can go on, as another worker, with those that are left and others in the place of those
        that have ended."""
        return False

    def on_silence(self, channel: Channel) -> None:
        """Nothing comes from a rank any more."""

    @abstractmethod
    def on_end(self, channel: Channel, error: FatalError) -> None:
        """A rank's channel is closed."""


class RankGroup(WatchedRanks):
    """Whose ranks are processes of this host."""

    def __init__(self, started: StartedRanks, on_failure: Callable[[], None]) -> None:
        self._lasting = started.lasting
        numbers = started.numbers or range(1, 1 + len(started.ends))
        channels = [Channel(end, f"rank {rank}") for rank, end in zip(numbers, started.ends, strict=True)]
        super().__init__(channels, 1 + len(channels), started.memory, on_failure)
        self.processes = started.processes
        self._sockets = started.links
        self.links = [one.fileno() for one in self._sockets]
        self._silent: list[RankProcess] = []
        for rank, process in zip(numbers, self.processes, strict=True):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    @property
    def may_form_again(self) -> bool:
        return bool(self.failure) and self._lasting is not None and self._lasting.may_form_again

    def next_group(self) -> StartedRanks:
        """Once this one is left."""
        assert self._lasting is not None
        return self._lasting.next_group()

    def leave(self) -> None:
        """This group, which has ended, but not its processes; those that are silent are killed."""
        self._leaving = True
        self._hang_up()
        for process in self._silent:
            process.kill()
            process.wait(LEAVE_SECONDS)
        self._let_go()

    def close(self) -> None:
        """The others leave; those that do not are killed, also where they are stopped."""
        self._leaving = True
        if self._lasting is not None:
            self._lasting.dismiss()
        if self.model is not None:
            self.model.end()
        else:
            self._hang_up()
        for process in self.processes:
            try:
                process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        super().close()

    def on_silence(self, channel: Channel) -> None:
        self._silent += [process for process, own in zip(self.processes, self._channels, strict=True) if own is channel]

    def on_end(self, channel: Channel, error: FatalError) -> None:
        """Its process ends too, and says more."""

    def _watch(self, rank: int, process: RankProcess) -> None:
        status = process.wait()
        if not self._leaving:
            log.error("rank_ended", rank=rank, pid=process.pid, status=status)
        self.fail(f"rank {rank} of the group has ended with status {status}")


class HostGroup(WatchedRanks):
    """Whose ranks join over TCP, from wherever they are started."""

    def __init__(self, listener: RankListener, ranks: int, on_failure: Callable[[], None]) -> None:
        super().__init__([], ranks, os.memfd_create("pageant-ranks"), on_failure)
        self._listener = listener
        self.port = listener.port

    def settle(self, own: RankReady, num_bytes: int) -> GroupStart:
        """Raises FatalError where a rank does not come."""
        members = self._listener.wait_for_all()
        self._listener.close()
        self._channels = [one.channel for one in members]
        self._sockets = [one.link for one in members if one.link is not None]
        self.links = [one.fileno() for one in self._sockets]
        for channel in self._channels:
            channel.beat()
        return super().settle(own, num_bytes)

    def close(self) -> None:
        """The others lose their connections, and end.  No step is computed any more."""
        self._listener.close()
        super().close()

    def on_end(self, channel: Channel, error: FatalError) -> None:
        log.error("rank_ended", rank=channel.name, reason=str(error))
        self.fail(str(error))


class StagesOfRanks(StageRanks):
    """Of a worker whose stages are groups of ranks: those of its own stage, and the leaders of the others."""

    def __init__(self, within: RankGroup, others: RankGroup | HostGroup) -> None:
        within.above = others
        super().__init__(others.place, within, others)
        self.within, self.others = within, others

    @property
    def place(self) -> Place:
        return self.stage

    @property
    def model(self) -> RankModel | None:
        return self.others.model

    @property
    def failure(self) -> str:
        return self.within.failure or self.others.failure

    @property
    def may_form_again(self) -> bool:
        return False

    def close(self) -> None:
        self.others.close()
        self.within.close()


AnyGroup = RankGroup | HostGroup | StagesOfRanks


def make_group(settings: Settings, started: Started, on_failure: Callable[[], None]) -> AnyGroup | None:
    """None for a worker that computes alone.  Raises ConfigError."""
    if settings.engine.ranks == 1:
        return None
    others: RankGroup | HostGroup
    if isinstance(started.others, StartedRanks):
        others = RankGroup(started.others, on_failure)
    else:
        listener = started.others or RankListener(settings, group_key(settings.deployment.runtime_path))
        others = HostGroup(listener, settings.engine.members, on_failure)
    return others if started.within is None else StagesOfRanks(RankGroup(started.within, on_failure), others)
