"""A draft in process: its session and proposer, without actor, thread and sockets."""

from __future__ import annotations

from services.draft.ngram import NGramProposer
from services.draft.proposer import Proposer
from services.draft.session import DraftSession
from shared.config import Settings
from shared.messages import DraftCapacity, DraftProposals, DraftUpdate

LINGER = 4  # turns that a draft takes while the target computes: what it then says, it has run ahead for


def make_proposer(settings: Settings) -> Proposer:
    """As `services.draft.main` chooses."""
    if settings.speculation.draft == "ngram":
        return NGramProposer(
            num_rows=settings.scheduling.max_num_seqs,
            max_model_len=settings.scheduling.max_model_len,
            shortest=settings.speculation.prompt_lookup_min,
            longest=settings.speculation.prompt_lookup_max,
        )
    from services.draft.load import load_proposer

    return load_proposer(settings)


class InProcessDraft:
    """Answers updates at once, and goes on from its own guess when it is let linger; says nothing while `silent`."""

    def __init__(self, proposer: Proposer) -> None:
        self.silent = False
        self.capacity: DraftCapacity = proposer.capacity
        self._session = DraftSession(proposer)

    def tell(self, update: DraftUpdate) -> None:
        if not self.silent:
            self._session.apply(update)

    def answers(self) -> list[DraftProposals]:
        """The next ones; none where nothing is owed."""
        while not self._session.is_idle and not self.silent:
            if found := self._session.turn():
                return found
        return []

    def linger(self) -> list[DraftProposals]:
        """What some more turns give, if anything is left to do."""
        found: list[DraftProposals] = []
        for _ in range(LINGER):
            if not self._session.is_idle and not self.silent:
                found += self._session.turn()
        return found
