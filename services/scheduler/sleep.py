"""A model that sleeps: its workers are away on purpose, and come when a request wants them.

The shell's part of it.  While no worker is there, requests that come are held here and go to the core with the first
worker; those that a worker had begun wait in the core, as after any loss.  Both are booked as waiting for the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from services.scheduler.lifecycle.admission import check_queue
from services.scheduler.lifecycle.parking import is_later_call
from services.scheduler.scheduler import Scheduler
from shared.activity import Activity, is_marked_asleep, write_activity
from shared.errors import RejectCode, RequestError
from shared.messages import AddRequest, AttachRequest, WorkerCapacity
from shared.processes.background import BackgroundQueue
from shared.tracing.latency import LatencyTracker, arrived
from shared.tracing.phases import Phase

log = structlog.get_logger()

MAX_WAITING, SIZE = 8, 128  # of what is not written yet: only the newest is; bytes of each


@dataclass(slots=True)
class HeldRequest:
    """A request that waits for the model, and its account of time where its client asks for one."""

    message: AddRequest
    account: LatencyTracker | None


class ModelSleep:
    """Whether the model of one scheduler sleeps, the requests that wait for it, and what the supervisor is told.

    Invariant: requests are held only while the model sleeps and no worker is there.
    """

    def __init__(self, core: Scheduler, directory: str) -> None:
        """`directory`: of `shared.activity`; empty: the model never sleeps."""
        self.is_asleep = False
        self.version = 0  # of the roster's part
        self._core = core
        self._directory = Path(directory) if directory else None
        self._held: dict[str, HeldRequest] = {}
        self._limits: tuple[WorkerCapacity | None, int, int] = (None, 0, 0)  # of the last worker
        self._num_taken = 0
        self._num_gateways = 0
        self._said: Activity | None = None
        self._queue: BackgroundQueue[Activity] = BackgroundQueue(
            "activity", self._write, max_items=MAX_WAITING, max_bytes=MAX_WAITING * SIZE, on_gap=lambda _: []
        )
        self._look()  # an earlier life of the scheduler may have ended while the model slept

    def __len__(self) -> int:
        """How many requests are held."""
        return len(self._held)

    @property
    def counts(self) -> tuple[int, int]:
        """Of those that are held, how many are not of the background, and how many are."""
        num_background = sum(one.message.header.is_background for one in self._held.values())
        return len(self._held) - num_background, num_background

    @property
    def limits(self) -> tuple[WorkerCapacity | None, int, int]:
        """The smallest worker, the longest sequence and the longest prompt; of the last worker while the model
        sleeps."""
        intake = self._core.intake
        if intake.capacity is not None or not self.is_asleep:
            self._limits = intake.capacity, intake.max_model_len, intake.max_input_length
        return self._limits

    def tick(self, now: float, num_gateways: int) -> None:
        self._expire(now)
        self._look()
        self.release(now)
        self.tell(num_gateways)

    def _look(self) -> None:
        """Does the supervisor have the model asleep?"""
        _ = self.limits  # as they are before the workers leave
        asleep = self._directory is not None and is_marked_asleep(self._directory)
        if asleep != self.is_asleep:
            self.is_asleep = asleep
            self.version += 1
            log.info("asleep" if asleep else "awake", num_held=len(self._held))

    # -- requests

    def hold(self, message: AddRequest, now: float) -> bool:
        """Keep a request until a worker is there; False where it can go to the core now."""
        self._num_taken += 1
        if not self.is_asleep or self._core.replicas:
            return False
        header, account = message.header, None
        if (earlier := self._held.get(header.request_id)) is not None:
            if not is_later_call(header, earlier.message.header):  # a replay
                return True
            account = earlier.account  # its client is back
        elif not message.is_resumed:
            try:
                self._check_room(message)
            except RequestError as error:
                self._core.counters.num_rejected += 1
                self._core.outbound.reject(header.gateway, header.request_id, error)
                return True
        if account is None and message.latency is not None:
            latency, since = arrived(message.latency, Phase.TO_SCHEDULER, now=now, busy_since=now)
            account = LatencyTracker(Phase.WAKING, since, latency)
        self._held[header.request_id] = HeldRequest(message, account)
        return True

    def _check_room(self, message: AddRequest) -> None:
        """As the core counts once it has all of them, beside what waits there: what is held is not refused then."""
        is_background = message.header.is_background
        same = [held.message for held in self._held.values() if held.message.header.is_background == is_background]
        counts = [1 if one.params.beam is not None else min(one.params.n, self._core.policy.max_n) for one in same]
        sizes = [len(one.prompt_token_ids) // 4 for one in same]
        there = [one.num_tokens for one in self._core.unassigned if one.is_background == is_background]
        num_tokens = sum(there) + sum(count * size for count, size in zip(counts, sizes, strict=True))
        check_queue(len(there) + sum(counts), num_tokens, self._core.policy, is_background=is_background)

    def attach(self, message: AttachRequest) -> bool:
        """The client of a held request has come back; False where none is held."""
        held = self._held.get(message.request_id)
        if held is None:
            return False
        header = msgspec.structs.replace(
            held.message.header, gateway=message.gateway, deadline=message.deadline, time_left=message.time_left
        )
        held.message = msgspec.structs.replace(held.message, header=header)
        return True

    def abort(self, request_id: str, gateway: str) -> None:
        """Forget a held request, unless it is another gateway's by now."""
        held = self._held.get(request_id)
        if held is not None and gateway in ("", held.message.header.gateway):
            del self._held[request_id]

    def abort_gateway(self, address: str) -> None:
        self._held = {name: one for name, one in self._held.items() if one.message.header.gateway != address}

    def release(self, now: float) -> None:
        """Give the core what is held, in the order of arrival, once a worker is there or the model sleeps no more."""
        if not self._held or (self.is_asleep and not self._core.replicas):
            return
        held, self._held = self._held, {}
        for one in held.values():
            latency = None if one.account is None else one.account.breakdown(now)
            self._core.add(msgspec.structs.replace(one.message, latency=latency), now)

    def _expire(self, now: float) -> None:
        """End the held requests whose deadline has passed."""
        for name, one in list(self._held.items()):
            header = one.message.header
            if header.deadline is not None and header.deadline <= now:
                del self._held[name]
                self._core.counters.num_expired += 1
                late = RequestError("the deadline has passed", code=RejectCode.DEADLINE_EXCEEDED)
                self._core.outbound.reject(header.gateway, name, late)

    def book(self) -> None:
        """A worker has left: what waits in the core for the next one waits for the model."""
        if self.is_asleep and not self._core.replicas:
            for sequence in self._core.unassigned:
                self._core.accounts.passed_over(sequence, Phase.WAKING)

    # -- the supervisor

    def tell(self, num_gateways: int | None = None) -> None:
        """Say what there is to do, where it matters at once; at every tick, which gives the gateways, in any case."""
        if self._directory is None:
            return
        is_news = self.is_asleep and not self._core.replicas and not (self._said and self._said.num_requests)
        if num_gateways is None and not (is_news and (self._held or self._core.requests)):
            return
        self._num_gateways = self._num_gateways if num_gateways is None else num_gateways
        self._said = Activity(
            num_requests=len(self._held) + len(self._core.requests),
            num_taken=self._num_taken,
            num_gateways=self._num_gateways,
            num_workers=len(self._core.replicas),
            is_asleep=self.is_asleep,
        )
        self._queue.put(self._said, SIZE)

    def _write(self, said: list[Activity]) -> None:
        assert self._directory is not None  # or nothing is said
        write_activity(self._directory, said[-1])
