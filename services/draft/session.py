"""The rows that a draft follows on one link, and the proposals that it owes.

It knows neither sockets nor how proposals are made.  Updates may come at any time, and later ones win: an update that
comes while a proposal is being made is applied before the next piece of work, so that a stale one is given up early.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from services.draft.order import ProposalOrder
from services.draft.proposer import Proposer
from shared.clocks.epochs import is_late
from shared.config import MAX_DRAFT_TOKENS
from shared.errors import ProtocolError
from shared.messages import AdmittedSequence, DraftProposals, DraftUpdate

MOST_WANTED = 2 * MAX_DRAFT_TOKENS  # of a row: a guess for the next step and as much ahead

log = structlog.get_logger()


class DraftSession:
    """One draft link.

    Invariant: the proposer follows exactly the rows of `_num_told`, and has so many tokens of each, in order, from
    updates of this epoch.
    """

    def __init__(self, proposer: Proposer, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._proposer = proposer
        self._clock = clock
        self._epoch = 0
        self._update_id = 0  # the newest
        self._rejection = False
        self._num_told: dict[int, int] = {}  # by row
        self._orders: list[ProposalOrder] = []
        self._step_seconds = 0.0  # of one of the latest piece of work

    @property
    def is_idle(self) -> bool:
        """Whether no answer is due."""
        return not self._orders

    # -- updates

    def apply(self, update: DraftUpdate) -> None:
        """Forget, open, append, note what is wanted.  An update of an older epoch is ignored.

        Raises ProtocolError where its columns do not fit together; the gap that this leaves shows with the next one.
        """
        check_columns(update)
        if is_late(update.epoch, self._epoch):
            return
        order = ProposalOrder(update.update_id, update.num_ahead)
        if update.epoch != self._epoch:  # a newer epoch, or another life of the scheduler
            self._forget_all()
            self._epoch = update.epoch
        elif update.update_id != self._update_id + 1 or update.rejection != self._rejection:
            order.lost |= self._num_told.keys()
            self._forget_all()
        self._update_id, self._rejection = update.update_id, update.rejection
        for row in update.closed_rows:
            self._close(row)
        for sequence in update.opened:
            self._open(sequence, order)
        self._commit(update, order)
        order.lost -= self._num_told.keys()
        if order.lost:
            log.warning("rows_lost", rows=sorted(order.lost), update_id=update.update_id)
        self._orders = [one for one in (*self._orders, order) if one.wanted or (one.lost and not one.is_answered)]

    def _forget_all(self) -> None:
        self._num_told.clear()
        self._orders.clear()
        self._proposer.reset()

    def _open(self, sequence: AdmittedSequence, order: ProposalOrder) -> None:
        self._close(sequence.row)
        count, rest = divmod(len(sequence.token_ids), 4)
        if rest or not count or not 0 <= sequence.row < self._proposer.capacity.num_rows:
            order.lost.add(sequence.row)
            return
        try:
            self._proposer.open(sequence)
        except ProtocolError:
            order.lost.add(sequence.row)
        else:
            self._num_told[sequence.row] = count

    def _commit(self, update: DraftUpdate, order: ProposalOrder) -> None:
        end = 0
        columns = (update.rows, update.num_tokens, update.num_new, update.num_wanted)
        for row, num_tokens, num_new, num_wanted in zip(*columns, strict=True):
            start, end = end, end + num_new
            self._withdraw(row)
            if not self._tell(row, num_tokens, update.new_token_ids[start:end]):
                self._close(row)
                order.lost.add(row)
            elif num_wanted:
                order.wanted[row] = num_wanted

    def _tell(self, row: int, num_tokens: int, token_ids: list[int]) -> bool:
        """Whether the row can still be followed."""
        if self._num_told.get(row) != num_tokens:
            return False
        try:
            self._proposer.commit(row, token_ids)
        except ProtocolError:
            return False
        self._num_told[row] = num_tokens + len(token_ids)
        return True

    def _close(self, row: int) -> None:
        self._withdraw(row)
        if self._num_told.pop(row, None) is not None:
            self._proposer.close(row)

    def _withdraw(self, row: int) -> None:
        """Drop what earlier updates wanted of a row; the update that is applied now says what it wants."""
        for order in self._orders:
            order.wanted.pop(row, None)

    # -- answers

    def turn(self) -> list[DraftProposals]:
        """The answers that are ready; where none is, compute one piece first."""
        answers = self._settle()
        if not answers and self._orders:
            self._work()
            answers = self._settle()
        return answers

    def _work(self) -> None:
        """Orders without an answer come before orders that run ahead."""
        urgent = [order for order in self._orders if not order.is_answered] or self._orders
        goals = {row: order.goal(row) for order in urgent for row in order.wanted}
        begin = self._clock()
        num_steps = self._proposer.propose(goals, self._rejection)
        self._step_seconds = (self._clock() - begin) / num_steps

    def _settle(self) -> list[DraftProposals]:
        answers: list[DraftProposals] = []
        left: list[ProposalOrder] = []
        for order in self._orders:
            later = self._answer(order, answers)
            left += [one for one in (order, later) if one is not None and one.wanted]
        self._orders = left
        return answers

    def _answer(self, order: ProposalOrder, answers: list[DraftProposals]) -> ProposalOrder | None:
        """Answer an order that has what it wants, and empty it where it has all that it ever will.

        Rows that have much to read first are answered on their own, where others are done: the order of these.
        """
        lacking = [row for row in order.wanted if not self._proposer.finished(row, order.goal(row))]
        later: ProposalOrder | None = None
        if lacking:
            if order.is_answered or len(lacking) == len(order.wanted):
                return None
            if not all(self._proposer.is_behind(row) for row in lacking):
                return None
            later = order.split(lacking)
        answer = self._compose(order)
        if not order.is_answered or len(answer.draft_token_ids) > order.num_sent:
            answers.append(answer)
        if order.is_answered or all(self._proposer.finished(row, order.longest(row)) for row in order.wanted):
            order.wanted.clear()
        order.is_answered, order.num_sent = True, len(answer.draft_token_ids)
        return later

    def _compose(self, order: ProposalOrder) -> DraftProposals:
        """The update that is named is the one that is answered: the scheduler may be waiting for a newer one.

        draft_time is what a guess of this length takes, also where some of it had been made before it was asked for.
        """
        rows = list(order.wanted)
        proposals = [self._proposer.guess(row, order.longest(row)) for row in rows]
        counts = [len(proposal.token_ids) for proposal in proposals]
        return DraftProposals(
            epoch=self._epoch,
            update_id=order.update_id,
            rows=rows,
            num_tokens=[self._num_told[row] for row in rows],
            num_draft_tokens=counts,
            draft_token_ids=[token_id for proposal in proposals for token_id in proposal.token_ids],
            distributions=[one for proposal in proposals for one in proposal.distributions],
            lost_rows=[] if order.is_answered else sorted(order.lost),
            draft_time=self._step_seconds * max(counts, default=0),
        )


def check_columns(update: DraftUpdate) -> None:
    """Raises ProtocolError unless the columns give every row its part."""
    for name in ("num_tokens", "num_new", "num_wanted"):
        column: list[int] = getattr(update, name)
        if len(column) != len(update.rows) or min(column, default=0) < 0:
            raise ProtocolError(f"draft update {update.update_id} lacks one {name}, 0 or more, for each of its rows")
    if max(update.num_ahead, *update.num_wanted, 0) > MOST_WANTED:
        raise ProtocolError(f"draft update {update.update_id} wants more than {MOST_WANTED} tokens of a row")
    if sum(update.num_new) != len(update.new_token_ids):
        raise ProtocolError(
            f"draft update {update.update_id} has {len(update.new_token_ids)} new tokens for counts that sum to "
            f"{sum(update.num_new)}"
        )
