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
    num_bytes: int
    max_bytes: int
    num_served: int  # blocks that came from there


class StoreState(msgspec.Struct, frozen=True):
    """One store, at one moment."""

    instance: str
    shelves: Mapping[str, Shelf]  # by medium: memory, and disk where there is one
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
            return [({"medium": medium}, getattr(shelf, field)) for medium, shelf in state.shelves.items()]

        yield make.gauge("pageant_store_blocks", "KV blocks that it has.", by_medium("num_blocks"))
        yield make.gauge("pageant_store_bytes", "Bytes of these.", by_medium("num_bytes"))
        yield make.gauge("pageant_store_max_bytes", "The limit of these.", by_medium("max_bytes"))
        yield make.counter("pageant_store_blocks_served", "KV blocks that workers took.", by_medium("num_served"))
        yield make.gauge("pageant_store_links", "Workers that are connected.", state.num_links)
        corrupt = "KV blocks that a disk gave back otherwise than they were written; they are dropped."
        yield make.counter("pageant_store_corrupt_blocks", corrupt, state.num_corrupt)
        failed = "Writes that a disk did not take, as where it is full; then there is none for 10 s."
        yield make.counter("pageant_store_failed_writes", failed, state.num_failed_writes)
