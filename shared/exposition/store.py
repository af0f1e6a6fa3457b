"""The metrics of a store: what it has, and what became of what it was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.exposition.families import Families, Sample


class Shelf(msgspec.Struct, frozen=True):
    """What is in one medium."""

    num_blocks: int
    num_served: int  # blocks that came from there
    num_bytes: int | None = None  # None: not known, as of a backend
    max_bytes: int | None = None


class StoreState(msgspec.Struct, frozen=True):
    """One store, at one moment."""

    instance: str
    shelves: Mapping[str, Shelf]  # by medium: memory, and disk and backend where there is one
    num_links: int
    num_corrupt: int = 0
    num_failed_writes: int = 0


class StoreCollector(Collector):
    """The metrics of one store at one moment."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state, make = self._state, Families(instance_id=self._state.instance)

        def by_medium(field: str) -> list[Sample]:
            found = {medium: getattr(shelf, field) for medium, shelf in state.shelves.items()}
            return [({"medium": medium}, value) for medium, value in found.items() if value is not None]

        yield make.gauge("pageant_store_blocks", "KV blocks that it has.", by_medium("num_blocks"))
        yield make.gauge("pageant_store_bytes", "Bytes of these.", by_medium("num_bytes"))
        yield make.gauge("pageant_store_max_bytes", "The limit of these.", by_medium("max_bytes"))
        yield make.counter("pageant_store_blocks_served", "KV blocks that workers took.", by_medium("num_served"))
        yield make.gauge("pageant_store_links", "Workers that are connected.", state.num_links)
        corrupt = "KV blocks that a disk or a backend gave back otherwise than they were written; they are dropped."
        yield make.counter("pageant_store_corrupt_blocks", corrupt, state.num_corrupt)
        failed = "Times that a disk, or a backend, failed or was full; then it is left alone for 10 s."
        yield make.counter("pageant_store_failed_writes", failed, state.num_failed_writes)
