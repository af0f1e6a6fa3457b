"""The drafts of a deployment: which draft follows which sequence, what was sent to it, and what it proposes.

A draft is expendable.  It gets the committed tokens, and only the part of a proposal that agrees with them is used; a
draft that is silent or wrong costs nothing but its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from services.scheduler.draft_length.proposal import NO_DRAFTS, DraftProposal, VerifiableDrafts
from services.scheduler.state.counters import Counters
from services.scheduler.state.sequence import Sequence
from shared.errors import ProtocolError
from shared.messages import AdmittedSequence, DraftCapacity, DraftProposals, DraftUpdate


class DraftLink:
    """One draft's life; another life is another link, with a greater epoch.

    Invariant: of each row that it follows, updates of this epoch have sent all tokens up to `num_sent`, in order.
    """

    def __init__(self, instance: str, epoch: int, capacity: DraftCapacity, *, rejection: bool) -> None:
        self.instance = instance
        self.epoch = epoch
        self.rejection = rejection
        self.capacity = capacity
        self.sequences: dict[int, Sequence] = {}  # by row
        self.num_updates = 0  # sent
        self.num_answered = 0  # the newest of them that it has answered
        self.is_late = False  # a step waited for it in vain, and it has been silent since
        self.is_gone = False  # this life is over: no answer comes
        self._free_rows = list(range(capacity.num_rows - 1, -1, -1))
        self._begin_update()

    def _begin_update(self) -> None:
        number, rejection = self.num_updates + 1, self.rejection
        self._next = DraftUpdate(self.epoch, number, [], [], [], [], [], [], [], rejection=rejection)
        self._num_ahead = 0  # of it

    def can_follow(self, sequence: Sequence) -> bool:
        return bool(self._free_rows) and sequence.num_tokens < self.capacity.max_model_len

    def follow(self, sequence: Sequence) -> Following:
        """Open a sequence with the next update."""
        row = self._free_rows.pop()
        self.sequences[row] = sequence
        self._next.opened.append(_for_draft(sequence.admitted(row)))
        return Following(self, row, self._next.update_id, sequence.num_tokens)

    def forget(self, following: Following) -> None:
        """Close a sequence with the next update, and its row may be given to another by the same."""
        del self.sequences[following.row]
        self._free_rows.append(following.row)
        self._next.closed_rows.append(following.row)

    def tell(self, sequence: Sequence, following: Following, num_wanted: int, *, ahead: bool) -> int:
        """Add committed tokens, and how many draft tokens are wanted, to the next update; returns its number."""
        new, update = sequence.token_ids[following.num_sent :], self._next
        update.rows.append(following.row)
        update.num_tokens.append(following.num_sent)
        update.num_new.append(len(new))
        update.new_token_ids.extend(new)
        update.num_wanted.append(num_wanted)
        if ahead:
            self._num_ahead = max(self._num_ahead, num_wanted + 1)
        following.num_sent = sequence.num_tokens
        return update.update_id

    def take_update(self) -> DraftUpdate | None:
        """What was gathered since the last one; None where there is nothing to send."""
        if not (self._next.closed_rows or self._next.opened or self._next.rows):
            return None
        update = msgspec.structs.replace(self._next, num_ahead=self._num_ahead)
        self.num_updates = update.update_id
        self._begin_update()
        return update


def _for_draft(admitted: AdmittedSequence) -> AdmittedSequence:
    """A draft has no automata: the worker cuts what breaks a grammar.  Nor has it adapters: its tokens are guesses."""
    if admitted.adapter:
        admitted = msgspec.structs.replace(admitted, adapter="")
    if not admitted.params.is_held:
        return admitted
    free = msgspec.structs.replace(admitted.params, grammar=None, thinking=None)
    return msgspec.structs.replace(admitted, params=free)


@dataclass(slots=True)
class Following:
    """Where a sequence stands with the draft that follows it."""

    link: DraftLink
    row: int
    opened_by: int  # update; what answers an older one is about another sequence
    num_sent: int  # tokens
    proposal: DraftProposal | None = None
    num_verified: int = 0  # tokens, up to the last one that was drafted and verified


class DraftLinks:
    """All drafts.  Sequences spread evenly over them and stay where they are until their draft is gone."""

    def __init__(self, counters: Counters, *, rejection: bool, max_draft_tokens: int) -> None:
        self.links: dict[str, DraftLink] = {}
        self._followings: dict[Sequence, Following] = {}
        self._counters = counters
        self._rejection = rejection
        self._max_draft_tokens = max_draft_tokens  # per proposal, what is run ahead included

    def __bool__(self) -> bool:
        return bool(self.links)

    def add(self, instance: str, epoch: int, capacity: DraftCapacity) -> None:
        self.lose(instance)
        self.links[instance] = DraftLink(instance, epoch, capacity, rejection=self._rejection)

    def lose(self, instance: str) -> None:
        """A draft is gone, and what it proposed with it."""
        if link := self.links.pop(instance, None):
            link.is_gone = True
            for sequence in link.sequences.values():
                del self._followings[sequence]

    def by_epoch(self, epoch: int) -> DraftLink | None:
        return next((link for link in self.links.values() if link.epoch == epoch), None)

    def tell(self, sequence: Sequence, num_wanted: int, *, ahead: bool) -> tuple[DraftLink, int] | None:
        """Send a sequence's draft what was committed; returns the draft and the number of the update, None where no
        draft follows the sequence or has room for it."""
        following = self._followings.get(sequence)
        if following is None:
            able = [link for link in self.links.values() if link.can_follow(sequence)]
            if not able:
                return None
            link = min(able, key=lambda link: (len(link.sequences), link.instance))
            following = self._followings[sequence] = link.follow(sequence)
        return following.link, following.link.tell(sequence, following, num_wanted, ahead=ahead)

    def forget(self, sequence: Sequence) -> None:
        if following := self._followings.pop(sequence, None):
            following.link.forget(following)

    def take_updates(self) -> list[tuple[str, DraftUpdate]]:
        """By instance, the update to send to each now."""
        updates = ((link.instance, link.take_update()) for link in self.links.values())
        return [(instance, update) for instance, update in updates if update is not None]

    # -- proposals

    def take(self, link: DraftLink, message: DraftProposals, vocab_size: int) -> None:
        """Keep what a draft proposes.  Raises ProtocolError where its columns make no sense: nothing of it is kept."""
        self._check(link, message, vocab_size)
        link.num_answered = max(link.num_answered, message.update_id)
        link.is_late = False
        offset = 0
        for row, num_tokens, count in zip(message.rows, message.num_tokens, message.num_draft_tokens, strict=True):
            end = offset + count
            following = self._followed(link, row, message.update_id)
            if following is not None and num_tokens <= following.num_sent:
                tokens, distributions = message.draft_token_ids[offset:end], message.distributions[offset:end]
                following.proposal = DraftProposal(num_tokens, tokens, distributions)
            offset = end
        for row in message.lost_rows:
            if self._followed(link, row, message.update_id) is not None:
                self.forget(link.sequences[row])

    def _followed(self, link: DraftLink, row: int, update_id: int) -> Following | None:
        sequence = link.sequences.get(row)
        following = None if sequence is None else self._followings.get(sequence)
        return None if following is None or following.opened_by > update_id else following

    def _check(self, link: DraftLink, message: DraftProposals, vocab_size: int) -> None:
        num_tokens = len(message.draft_token_ids)
        if not len(message.rows) == len(message.num_tokens) == len(message.num_draft_tokens):
            raise ProtocolError("a draft's columns have different lengths")
        if any(not 0 <= count <= self._max_draft_tokens for count in message.num_draft_tokens):
            raise ProtocolError(f"a draft proposes more than {self._max_draft_tokens} tokens")
        if sum(message.num_draft_tokens) != num_tokens or len(message.distributions) not in (0, num_tokens):
            raise ProtocolError(f"a draft sends {num_tokens} tokens for counts of {sum(message.num_draft_tokens)}")
        if any(not 0 <= token < vocab_size for token in message.draft_token_ids):
            raise ProtocolError("a draft proposes a token outside the vocabulary")
        if any(count < 0 for count in message.num_tokens) or message.update_id > link.num_updates:
            raise ProtocolError("a draft answers an update that was not sent")
        for distribution in message.distributions:
            if len(distribution.token_ids) != len(distribution.probs) or len(distribution.token_ids) % 4:
                raise ProtocolError("a draft's distribution does not have one probability per token")

    def usable(self, sequence: Sequence) -> VerifiableDrafts:
        """What of a sequence's proposal still follows its tokens; one that does not agree with them is dropped."""
        following = self._followings.get(sequence)
        if following is None or following.proposal is None:
            return NO_DRAFTS
        proposal = following.proposal
        if (drafts := proposal.behind(sequence.token_ids)) is None:
            first = max(proposal.num_tokens, following.num_verified)
            self._counters.num_stale_draft_tokens += max(0, proposal.num_tokens + len(proposal.token_ids) - first)
            following.proposal = None
            return NO_DRAFTS
        return drafts

    def verifies(self, sequence: Sequence, drafts: VerifiableDrafts) -> None:
        """These, which were usable, are in a step."""
        if following := self._followings.get(sequence):  # else they are a worker's own
            following.num_verified = sequence.num_tokens + len(drafts.token_ids)
