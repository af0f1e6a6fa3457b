"""Loads adapters beside the steps, in the order of the scheduler's orders."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Protocol

import structlog

from shared.errors import FatalError, ModelError
from shared.messages import Adapter, AdapterFailure, AdaptersHeld, HoldAdapters

log = structlog.get_logger()

# Of the thread that loads: a sixth of a core that steps are computed on too, instead of half.  Without it the steps
# beside a load take longer than others' tokens may wait; with 10 an adapter comes 150 ms after its order
# (docs/measurements/adapters.md).
NICENESS = 7


class Bank(Protocol):
    """What orders need of the model's adapters."""

    @property
    def held(self) -> list[str]: ...

    def load(self, directory: Path, digest: str = "") -> str: ...

    def keep(self, digests: set[str]) -> None: ...


class AdapterLoading:
    """A `shared.actor.executor.Computation`.  A file that cannot be served fails its own load alone."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._waiting: deque[HoldAdapters] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def apply(self, work: HoldAdapters) -> None:
        self._waiting.append(work)

    def turn(self) -> list[AdaptersHeld]:
        order = self._waiting.popleft()
        self._bank.keep({adapter.digest for adapter in order.adapters})
        held, failures = [], []
        for adapter in order.adapters:
            try:
                held.append(self._hold(adapter))
            except FatalError:  # of the group of ranks, not of the adapter
                raise
            except ModelError as error:
                log.error("adapter_failed", adapter=adapter.name, path=adapter.path, reason=str(error))
                failures.append(AdapterFailure(adapter, str(error)))
            except Exception as error:  # whatever a file or a path does, streams go on
                log.exception("adapter_failed", adapter=adapter.name, path=adapter.path, reason=repr(error))
                failures.append(AdapterFailure(adapter, f"the adapter cannot be read: {error!r}"))
        return [AdaptersHeld(order.epoch, order.order, held, failures)]

    def _hold(self, adapter: Adapter) -> Adapter:
        if adapter.digest in self._bank.held:
            return adapter
        digest = self._bank.load(Path(adapter.path), adapter.digest)
        log.info("adapter_loaded", adapter=adapter.name, path=adapter.path, digest=digest)
        return Adapter(adapter.name, digest, adapter.path)
