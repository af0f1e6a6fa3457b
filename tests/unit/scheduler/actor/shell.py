"""A scheduler's shell without a loop: its handlers are called one by one, and what it sends is kept."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.actor import SchedulerActor
from services.scheduler.main import make
from shared.config import Settings
from shared.messages import (
    AddRequest,
    DraftCapacity,
    Hello,
    RequestHeader,
    ServiceName,
    StepPlan,
    StepResult,
    schema_hash,
)
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from shared.transport import MemoryTransport
from tests.unit.scheduler.worlds.fake_worker import FakeWorker, capacity

SERVICES = {"w": ServiceName.WORKER, "d": ServiceName.DETOKENIZER, "g": ServiceName.GATEWAY, "s": ServiceName.DRAFT}


class Shell:
    """A shell whose messages are kept, and whose time is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        values = {"heartbeat_timeout": 10.0, "reconcile_interval": 5.0, **settings}
        actor = make(MemoryTransport(), Settings.of(**values))
        assert isinstance(actor, SchedulerActor)
        self.actor = actor
        self.sent: list[tuple[str, Any]] = []
        self.later: list[float] = []
        self.told: list[str] = []  # alarms of which an incident was written
        self.workers: dict[str, FakeWorker] = {}
        monkeypatch.setattr(actor, "send", lambda address, message: self.sent.append((address, message)))
        monkeypatch.setattr(actor.traffic, "_send", actor.send)
        monkeypatch.setattr(actor, "afterwards", lambda work: work())
        monkeypatch.setattr(actor, "later", lambda seconds, message: self.later.append(seconds))
        monkeypatch.setattr(actor, "say_status", lambda: None)
        actor.now = actor._last_tick = actor._last_reconciled = 1000.0

    def hear(self, message: Any) -> None:
        self.actor.handlers()[type(message)](message)
        self.actor.before_flush()

    def taken(self, kind: type[Any], address: str = "") -> list[Any]:
        """The messages of a kind that went to an address, or anywhere, since they were last taken."""
        found = [one for where, one in self.sent if isinstance(one, kind) and address in ("", where)]
        self.sent = [(where, one) for where, one in self.sent if one not in found]
        return found

    def hello(self, name: str, epoch: int = 1, **more: Any) -> Hello:
        service = SERVICES[name[0]]
        size = capacity() if service is ServiceName.WORKER else None
        draft = DraftCapacity(8, 128, 50, "fake") if service is ServiceName.DRAFT else None
        values = {"worker": size, "draft": draft} | more
        return Hello(service, name, f"at-{name}", epoch, schema_hash(), **values)

    def join(self, *names: str) -> None:
        for name in names:
            self.hear(self.hello(name))
            if name[0] == "w":
                self.workers[name] = FakeWorker(capacity())
        self.sent.clear()

    def ask(self, request_id: str = "r", **more: Any) -> None:
        params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        resolved = params.resolved(GenerationDefaults(), max_tokens=16)
        header = RequestHeader(request_id, "at-g", arrival_time=self.actor.now, **more)
        self.hear(AddRequest(header, resolved, pack_tokens([1, 2, 3, 4]), [0]))

    def work(self, name: str = "w") -> None:
        """A worker answers all plans that it was sent."""
        for plan in self.taken(StepPlan, f"at-{name}"):
            answer = self.workers[name].take(plan)
            assert isinstance(answer, StepResult)
            self.hear(answer)

    @property
    def members(self) -> list[str]:
        return [member.instance for member in self.actor.membership.members]
