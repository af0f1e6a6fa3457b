"""The draft link: scheduler -> draft -> scheduler, FIFO, fenced by an epoch.

The scheduler sends a draft the committed tokens, and the draft proposes tokens that may follow.
"""

from __future__ import annotations

from shared.messages.base import Message
from shared.messages.steps import AdmittedSequence, DraftDistribution


class DraftCapacity(Message, frozen=True):
    """What a draft offers; its vocabulary must be the workers'."""

    num_rows: int  # sequences that it follows at a time
    max_model_len: int  # tokens; beyond them it proposes nothing
    vocab_size: int  # 0: any
    model: str


class DraftUpdate(Message, frozen=True):
    """What was committed, and what is wanted.  The columns rows ... num_wanted are parallel.

    A draft does, in this order: forget the closed rows, open rows, append the committed tokens, propose.
    """

    epoch: int
    update_id: int  # grows by one; the answer names the newest that it has seen
    closed_rows: list[int]
    opened: list[AdmittedSequence]
    rows: list[int]
    num_tokens: list[int]  # that the draft had before this update, prompt and output
    num_new: list[int]
    new_token_ids: list[int]  # concatenated
    num_wanted: list[int]  # draft tokens; 0: none
    num_ahead: int = 0  # tokens to go on with from its own guess, once it has answered
    rejection: bool = False  # drafts are drawn from a distribution that goes with them


class DraftProposals(Message, frozen=True):
    """The tokens that a draft proposes.  The columns rows, num_tokens and num_draft_tokens are parallel.

    A later answer for a row replaces an earlier one: one that ran ahead begins with what was proposed before.
    """

    epoch: int
    update_id: int  # the newest update that the draft had seen
    rows: list[int]
    num_tokens: list[int]  # committed tokens that each proposal was made on
    num_draft_tokens: list[int]
    draft_token_ids: list[int]  # concatenated
    distributions: list[DraftDistribution] = []  # one per draft token, or none: each was certain
    lost_rows: list[int] = []  # that it cannot follow any more: to be closed, and opened again
    draft_time: float = 0.0  # seconds of computing
