"""What is noted while decisions are made: figures, events, missed prefixes, what tenants were served, and times."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.state.counters import Counters
from services.scheduler.state.fairness import Shares
from services.scheduler.state.phases import TimeAccounts
from services.scheduler.telemetry.journal import EventJournal
from services.scheduler.telemetry.prefix_misses import PrefixMissDiagnostics


@dataclass(frozen=True, slots=True)
class Books:
    """One of a scheduler, which all its parts share."""

    counters: Counters
    journal: EventJournal
    misses: PrefixMissDiagnostics
    shares: Shares
    accounts: TimeAccounts
