"""The other ranks of a worker's group, as processes of this host, and what is done when one ends.

A group is one worker to everybody else: this process leads it and is the only one on the bus.  Where a rank ends, so
does the group, and with it this process, whose supervisor begins another.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable

import structlog

from engine.loading.ranks import Channel, LeadingRanks
from kernels.cpu import abi
from services.worker.rank_processes import RankProcess, StartedRanks

LEAVE_SECONDS = 1.0

log = structlog.get_logger()


class RankGroup(LeadingRanks):
    """Ranks 1 ... ranks - 1.  `failure` says which has ended, and how."""

    def __init__(self, started: StartedRanks, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called in a thread, once `failure` is set."""
        super().__init__([Channel(end) for end in started.ends], started.memory)
        self.failure = ""
        self.processes = started.processes
        self._on_failure = on_failure
        self._leaving = False
        for rank, process in enumerate(self.processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def close(self) -> None:
        """The others leave; those that do not are killed, also where they are stopped."""
        self._leaving = True
        if self.model is not None:
            self.model.end()
        else:
            self._hang_up()
        for process in self.processes:
            try:
                process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        self._hang_up()
        os.close(self.memory)

    def _hang_up(self) -> None:
        for channel in self._channels:
            channel.close()

    def _watch(self, rank: int, process: RankProcess) -> None:
        status = process.wait()
        if self._leaving:
            return
        log.error("rank_ended", rank=rank, pid=process.pid, status=status)
        self.failure = self.failure or f"rank {rank} of the group has ended with status {status}"
        if self.model is not None:
            self.model.end(abi.RANK_DIED)
        self._on_failure()


def make_group(started: StartedRanks | None, on_failure: Callable[[], None]) -> RankGroup | None:
    """None for a worker that computes alone."""
    return None if started is None else RankGroup(started, on_failure)
