"""Orders and questions to the supervisor of a machine's processes (`pageant serve`), and its answers: a line of JSON
over a socket in the runtime directory, lines of text back.

Only the deployment's own user has access to the directory.  Commands and gateways speak to it, and it knows neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from shared.config import FurtherModel

MAX_LINE = 4096  # bytes of an order
DONE = "done"
ACCEPTED = "accepted"
BUSY = "too many orders wait"  # the beginning of that answer
FEWEST = {"gateway": 1, "tokenizer": 1, "scheduler": 1, "worker": 1, "draft": 0, "detokenizer": 1, "store": 0}
MOST = {"scheduler": 1}


class ModelOrder(msgspec.Struct, frozen=True, kw_only=True):
    """`list`: nothing more.  `add`: `model`.  `remove`: `name`.  `swap`: have `name` in memory, and not `out`."""

    action: Literal["list", "add", "remove", "swap"]
    name: str = ""
    model: FurtherModel | None = None
    out: list[str] | None = None  # None: all others that are not pinned
    seconds: float | None = None  # that requests have to end; None: handover_timeout


class SupervisorOrder(msgspec.Struct, frozen=True):
    """Restart these services in turn, have so many replicas of them, do something with a model; or only say how the
    processes do."""

    restart: list[str] = []
    scale: dict[str, int] = {}
    report: bool = False  # the answer is a SupervisionReport, at once; nothing else is done
    model: ModelOrder | None = None
    wait: bool = True  # for the end of the work; else the answer is ACCEPTED as soon as it is in the queue

    def __str__(self) -> str:
        scaled = [f"{service}={count}" for service, count in self.scale.items()]
        model = [] if self.model is None else [self.model.action, self.model.name]
        parts = (("scale", scaled), ("restart", self.restart), ("model", model))
        return "; ".join(f"{verb} {' '.join(words)}" for verb, words in parts if words)


class ProcessReport(msgspec.Struct, frozen=True):
    """One process of a supervisor."""

    service: str
    index: int
    state: str  # ready; starting; unready (it was ready, and waits for others now); leaving; down (until its restart)
    pid: int  # 0 where it is down
    seconds: float  # since it was started
    num_deaths: int  # of processes in this role


class SupervisionReport(msgspec.Struct, frozen=True):
    """The processes, and the order that is being carried out, if there is one."""

    processes: list[ProcessReport] = []
    order: str = ""
    num_waiting: int = 0  # further orders
    failed: str = ""  # why the last order was not carried out, or empty


def objection(order: SupervisorOrder) -> str:
    """What keeps an order from being carried out, or an empty string."""
    for service in (*order.restart, *order.scale):
        if service not in FEWEST:
            return f"there is no service {service!r}"
    for service, count in order.scale.items():
        fewest, most = FEWEST[service], MOST.get(service)
        if count < fewest or (most is not None and count > most):
            return f"{service}={count}: there must be at least {fewest}" + (f" and at most {most}" if most else "")
    return ""


def desk_path(runtime_path: Path) -> Path:
    """Where the supervisor of this runtime directory takes orders."""
    return runtime_path / "serve.sock"
