"""Records of the decisions: counters, events, missed prefixes, the service of each tenant, and times."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.state.counters import Counters
from services.scheduler.state.fairness import Shares
from services.scheduler.state.phases import TimeAccounts
from services.scheduler.telemetry.journal import EventJournal
from services.scheduler.telemetry.prefix_misses import PrefixMissDiagnostics


@dataclass(frozen=True, slots=True)
class Books:
    """A scheduler has one, which all its parts share."""

    counters: Counters
    journal: EventJournal
    misses: PrefixMissDiagnostics
    shares: Shares
    accounts: TimeAccounts
