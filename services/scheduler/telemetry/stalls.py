"""Finds workers that have work and make no steps.  Time is passed in."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from services.scheduler.state.replica import Replica

Mark = tuple[int, int, int]  # changes with every plan and every result


class StallWatch:
    """Remembers the last step of each replica, and since when it has been the last."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._marks: dict[str, tuple[Mark, float]] = {}

    def look(self, replicas: Iterable[Replica], computing: Collection[str], now: float) -> list[str]:
        """Those that have had work for longer than the timeout without a step.

        `computing` are the workers which say that a step is under way and takes no longer than it may.
        """
        marks: dict[str, tuple[Mark, float]] = {}
        for replica in replicas:
            mark = (replica.epoch, replica.num_steps, replica.in_flight[0].step_id if replica.in_flight else -1)
            has_work = bool(replica.in_flight or replica.running or len(replica.waiting))
            seen, since = self._marks.get(replica.instance, (None, now))
            goes_on = not has_work or seen != mark or replica.instance in computing
            marks[replica.instance] = (mark, now if goes_on else since)
        self._marks = marks
        return sorted(name for name, (_, since) in marks.items() if now - since > self._timeout)
