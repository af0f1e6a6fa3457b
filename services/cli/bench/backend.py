"""What the generator needs of a server, whatever its interface."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from services.cli.bench.outcome import RequestOutcome
from shared.metrics import Acceptance
from shared.workload import LoadRequest


def start_header() -> tuple[str, str]:
    """Tells the server when a request left, so that both count from there."""
    return "x-request-start", f"t={time.time():.6f}"


class Served(msgspec.Struct, frozen=True):
    """The model that is asked; 0 where the interface does not tell."""

    name: str
    vocab_size: int
    max_model_len: int


class Streams(Protocol):
    """How one request reaches a server."""

    async def stream(self, request: LoadRequest, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        """Send it and note in `outcome` what comes, at `clock()`'s times; a failure goes into `outcome.error`."""


class ServerBackend(Streams, Protocol):
    """A server behind one interface."""

    name: str
    vocab_size: int

    async def model(self, patience: float) -> Served:
        """What is served, once the server answers; fails after `patience` seconds."""

    async def acceptance(self) -> Acceptance:
        """What speculation has yielded since the server's start; all zero where that is not told."""

    async def close(self) -> None: ...
