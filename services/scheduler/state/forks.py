"""What beam searches ask of the next plans: beams that begin where another stands, or end with another token."""

from __future__ import annotations

from collections.abc import Set

from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence


class Forks:
    """A side table of the replicas and sequences with beams.

    Invariant: what it has of a replica or a sequence goes with that.
    """

    def __init__(self) -> None:
        self.unsent: set[Sequence] = set()  # their workers have another last token, or do not have the row
        self._begun: dict[Replica, list[tuple[Sequence, Sequence]]] = {}

    def __bool__(self) -> bool:
        return bool(self.unsent or self._begun)

    @property
    def replicas(self) -> Set[Replica]:
        """Those where beams begin."""
        return self._begun.keys()

    def begin(self, replica: Replica, beam: Sequence, source: Sequence) -> None:
        """A waiting beam begins behind a running one with the next plan."""
        self._begun.setdefault(replica, []).append((beam, source))

    def take(self, replica: Replica) -> list[tuple[Sequence, Sequence]]:
        """Those that were begun since the last call."""
        return self._begun.pop(replica, [])

    def forget(self, sequence: Sequence) -> None:
        self.unsent.discard(sequence)
