"""What features keep of sequences beside the state that every sequence has."""

from __future__ import annotations

from services.scheduler.lifecycle.outputs import Outbound
from services.scheduler.speculation.records import DraftRecords
from services.scheduler.state.phases import TimeAccounts
from services.scheduler.state.sequence import Request, Sequence


class SideTables:
    """The tables whose entries live as long as their sequence: times, verified drafts, output that is no token."""

    def __init__(self, accounts: TimeAccounts, records: DraftRecords, outbound: Outbound) -> None:
        self.accounts = accounts
        self.records = records
        self.outbound = outbound

    def copy(self, sequence: Sequence, to: Sequence) -> None:
        """For a copy that goes on later; its time is accounted for from then on."""
        self.records.copy(sequence, to)
        self.outbound.copy(sequence, to)

    def forget(self, sequence: Sequence) -> None:
        self.accounts.forget(sequence)
        self.records.forget(sequence)
        self.outbound.forget(sequence)

    def let_go(self, request: Request) -> None:
        """A request is over and forgotten, and its sequences with it."""
        for sequence in request.sequences:
            self.forget(sequence)
        request.let_go()
