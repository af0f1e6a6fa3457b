"""What is noted while decisions are made: figures, events, missed prefixes, what tenants were served, and the time."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.counters import Counters
from services.scheduler.fairness import Shares
from services.scheduler.journal import Journal
from services.scheduler.misses import Misses
from services.scheduler.moment import Moment


@dataclass(frozen=True, slots=True)
class Books:
    """One of a scheduler, which all its parts share."""

    counters: Counters
    journal: Journal
    misses: Misses
    shares: Shares
    moment: Moment
