"""Which waiting sequences have room for their adapter in a step."""

from __future__ import annotations

from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence


class AdapterRoom:
    """Asked for waiting sequences in their order, from one `clear` to the next.

    One for whose adapter there is no room, in a step or at the worker, keeps those behind it from taking the room of
    the adapters that run: else adapters that are always asked for would keep the others out for ever.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._turned_away = False  # whether a sequence's adapter has no room

    def clear(self) -> None:
        self._turned_away = False

    def has_room(self, sequence: Sequence) -> bool:
        """Whether it needs no adapter, or a step may have its own."""
        if (adapter := sequence.request.header.adapter) is None:
            return True
        adapters = self._replica.adapters
        if self._turned_away and adapter.digest in adapters.running:
            return False
        may_start = adapters.may_start(adapter)
        self._turned_away |= not may_start and (
            adapters.holds(adapter.digest) or adapters.waits_for_room(adapter.digest)
        )
        return may_start
