"""The adapters that a worker holds, by the digests that plans name them with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from engine.lora.adapter import LoraAdapter
from engine.modeling.model import HoldsAdapters
from kernels.ops.linears.lora import NO_ADAPTER
from shared.errors import ModelError

UNKNOWN = -2  # the place of an adapter that is not held: its row must not be computed


class AdapterBank:
    """One thread loads and drops, while another one computes steps."""

    def __init__(
        self,
        model: HoldsAdapters,
        read: Callable[[Path, int], LoraAdapter],  # a directory, with the largest rank; raises ModelError
        *,
        count: int,
        max_rank: int,
    ) -> None:
        self.count = count
        self.max_rank = max_rank
        self._model = model
        self._read = read
        self.hold_elsewhere: Callable[[int, LoraAdapter], None] = lambda place, adapter: None  # other ranks; may raise
        self._places: dict[str, int] = {}
        self._heads: set[str] = set()  # digests of those that change the head
        self.lock = threading.Lock()  # held while a step is computed, in which nothing may be dropped
        model.reserve_adapters(count, max_rank)

    @property
    def held(self) -> list[str]:
        """Digests."""
        return list(self._places)

    @property
    def changes_head(self) -> bool:
        """Whether any that is held does: then logits need to know their rows' adapters."""
        return bool(self._heads)

    def place_of(self, digest: str) -> int:
        """NO_ADAPTER for an empty digest, UNKNOWN for one that is not held."""
        return self._places.get(digest, UNKNOWN) if digest else NO_ADAPTER

    def load(self, directory: Path, digest: str = "") -> str:
        """Hold what a directory has; returns its digest.  Raises ModelError where it cannot be served, or has another
        digest than the one that is wanted."""
        adapter = self._read_as(directory, digest)
        if adapter.digest in self._places:
            return adapter.digest
        taken = set(self._places.values())
        place = next((one for one in range(self.count) if one not in taken), None)
        if place is None:
            raise ModelError(f"max_cpu_loras: {self.count} adapters are held already")
        self.hold_elsewhere(place, adapter)
        self._model.hold_adapter(place, adapter)
        if adapter.head is not None:
            self._heads.add(adapter.digest)
        self._places[adapter.digest] = place
        return adapter.digest

    def put(self, place: int, directory: Path, digest: str) -> None:
        """Of a rank that does not lead: hold it at the leader's place.  Raises ModelError as `load`."""
        self._model.hold_adapter(place, self._read_as(directory, digest))

    def _read_as(self, directory: Path, digest: str) -> LoraAdapter:
        adapter = self._read(directory, self.max_rank)
        if digest not in ("", adapter.digest):
            raise ModelError(f"{directory} has another content than when it was loaded first")
        return adapter

    def keep(self, digests: set[str]) -> None:
        """Drop all others, when the step that is computed has ended."""
        if not self._places.keys() - digests:
            return
        with self.lock:
            for digest in self._places.keys() - digests:
                self._model.drop_adapter(self._places.pop(digest))
                self._heads.discard(digest)


class NoLock(contextlib.nullcontext[None]):
    """Where there is nothing to hold."""

    def acquire(self) -> None: ...

    def release(self) -> None: ...
