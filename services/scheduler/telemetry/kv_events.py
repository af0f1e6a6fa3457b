"""The events of all workers' pools, each worker by a number: vLLM's `data_parallel_rank`."""

from __future__ import annotations

from itertools import count

from services.scheduler.blocks.pool_events import PoolCleared, PoolEvent, PoolEvents
from services.scheduler.state.replica import Replica


class KVEvents:
    """Off until `is_on` is set.

    Invariant: a worker has the least number that no other one has.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._logs: dict[Replica, tuple[int, PoolEvents]] = {}
        self._ended: list[tuple[int, list[PoolEvent]]] = []  # of workers that are gone, not taken so far

    def join(self, replica: Replica) -> None:
        """A worker has come, with an empty pool."""
        if self.is_on:
            taken = {rank for rank, _ in self._logs.values()}
            rank = next(rank for rank in count() if rank not in taken)
            log = replica.pool.events = PoolEvents(replica.block_size, replica.pool.knows, [PoolCleared()])
            self._logs[replica] = rank, log

    def leave(self, replica: Replica) -> None:
        if replica in self._logs:
            rank, log = self._logs.pop(replica)
            replica.pool.events = None
            self._ended.append((rank, [*log.pending, PoolCleared()]))

    def take(self) -> list[tuple[int, list[PoolEvent]]]:
        """By number, what has happened since the last call; a number may be there twice, of two workers."""
        taken, self._ended = self._ended, []
        for rank, log in self._logs.values():
            if log.pending:
                taken.append((rank, log.pending))
                log.pending = []
        return taken
