"""Which waiting sequences have room for their adapter in a step."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence


class AdapterRoom:
    """Asked for waiting sequences in their order, from one `clear` to the next.

    One for whose adapter there is no room, in a step or at the worker, keeps those behind it from taking the room of
    the adapters that run: else adapters that are always asked for would keep the others out for ever.
    """

    def __init__(self, replica: Replica, give_way: Callable[[], bool]) -> None:
        """`give_way`: the resting sequences of one adapter give it up; False where none has one that others do not
        use."""
        self._replica = replica
        self._give_way = give_way
        self._turned_away = False  # whether a sequence's adapter has no room

    def clear(self) -> None:
        self._turned_away = False

    def has_room(self, sequence: Sequence) -> bool:
        """Whether it needs no adapter, or a step may have its own; for one that is not of the background others that
        rest give way."""
        if (adapter := sequence.request.header.adapter) is None:
            return True
        adapters = self._replica.adapters
        if self._turned_away and adapter.digest in adapters.running:
            return False
        may_start = adapters.may_start(adapter)
        if not sequence.is_background:
            while not may_start and adapters.holds(adapter.digest) and self._give_way():
                may_start = adapters.may_start(adapter)
            if adapters.waits_for_room(adapter.digest) and adapters.are_all_running:
                self._give_way()  # the worker can drop one when it gets the next order
        self._turned_away |= not may_start and (
            adapters.holds(adapter.digest) or adapters.waits_for_room(adapter.digest)
        )
        return may_start
