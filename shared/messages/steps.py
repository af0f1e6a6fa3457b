"""The step link: scheduler -> worker -> scheduler, strictly FIFO, fenced by an epoch."""

from __future__ import annotations

from enum import StrEnum

from shared.messages.base import Message
from shared.requests.sampling import SamplingParams


class AdmittedSequence(Message, frozen=True):
    """A sequence that takes a row: everything the worker needs to know of it, sent once."""

    row: int
    token_ids: bytes  # prompt and what has been generated so far, packed int32
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # of this sequence (request seed + index)
    eos_token_ids: list[int]  # masked until min_tokens are out
    request_id: str = ""  # for the worker's log, as the two below
    trace_id: str = ""
    index: int = 0
    adapter: str = ""  # digest of the one that the worker holds; empty: the base model


class DraftDistribution(Message, frozen=True):
    """What one draft token was drawn from: every token that had a chance, and its probability; they sum to one."""

    token_ids: bytes  # packed int32
    probs: bytes  # packed float32


class SlidingPlan(Message, frozen=True):
    """What a plan changes in the tables of one group of sliding layers.

    A table keeps its places: place i is for the tokens from i * block_size on, and those before the window are empty.
    A worker first empties places of all rows, then appends: to a table without blocks, behind its empty places.
    """

    num_left_blocks: list[int]  # parallel to the plan's rows: by how many places the first block's moves on
    num_new_blocks: list[int]  # parallel to the plan's rows
    new_block_ids: list[int]  # concatenated
    new_block_generations: list[int]
    block_copies: list[tuple[int, int]] = []
    copy_generations: list[int] = []


class StepPlan(Message, frozen=True):
    """One forward pass.  The columns rows ... num_new_blocks are parallel, one entry per scheduled sequence.

    A worker does, in this order: release rows, admit sequences, append new blocks to the rows' tables, copy blocks,
    run, sample.  One that keeps states takes forks, then loads, after it has admitted; it saves behind everything else.
    An entry samples exactly when num_computed_tokens + num_scheduled_tokens reaches the number of tokens that
    the row has; each row's token may still be on the device when the plan is made.  With draft tokens it reaches as
    many further: they are computed and verified, and the entry yields those accepted and one token more.
    """

    epoch: int
    step_id: int
    admitted: list[AdmittedSequence]
    rows: list[int]
    num_computed_tokens: list[int]  # before this step; the worker asserts it
    num_scheduled_tokens: list[int]
    num_new_blocks: list[int]
    new_block_ids: list[int]  # concatenated
    block_copies: list[tuple[int, int]]  # (source, destination), before anything else of the step
    released_rows: list[int]  # free since the last plan
    num_draft_tokens: list[int] = []  # parallel to rows, counted in num_scheduled_tokens; empty: none anywhere
    draft_token_ids: list[int] = []  # concatenated
    draft_distributions: list[DraftDistribution] = []  # one per draft token, or none: each was certain
    rejection: bool = False  # accept by rejection sampling; otherwise by equality with what is sampled
    new_block_generations: list[int] = []  # parallel to new_block_ids: which of its lives the block is in
    copy_generations: list[int] = []  # parallel to block_copies, of the sources
    sliding: list[SlidingPlan] = []  # one for each of the capacity's; empty: nothing changes in any
    state_forks: list[tuple[int, int]] = []  # (row, source): rows that take another one's state over, before the step
    state_loads: list[tuple[int, int, int]] = []  # (row, snapshot, its generation): states that rows begin with
    state_saves: list[tuple[int, int, int]] = []  # the same: snapshots of states as the step leaves them
    num_wanted_drafts: list[int] = []  # parallel to rows: that the worker's head drafts next; empty: none anywhere


class Refusal(StrEnum):
    STALE_BLOCK = "stale_block"  # a block of the row has been given to another sequence since
    NOT_IN_STEP = "not_in_step"  # the row is not held, or not at the place that the plan says


class TokenLogprobs(Message, frozen=True):
    """Log-probabilities at one position: the token itself first, then the most likely ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # 1-based rank of the token itself; ties count


class RefusedRow(Message, frozen=True):
    """An entry of a plan that was not computed, because its row would have read or written what is not its own."""

    entry: int
    reason: Refusal
    block_id: int = -1
    generation: int = 0  # of that block, as the row has it
    known: int = 0  # as the worker knows it
    unwritten: list[tuple[int, int]] = []  # blocks, with generations, that it was to fill and has not
    pool: int = 0  # of block_id: 0, or a sliding one, from 1
    sliding_unwritten: list[list[tuple[int, int]]] = []  # as `unwritten`, of each sliding pool


class StepResult(Message, frozen=True):
    """What one plan produced.  Columns are parallel to the plan's; a sequence that did not sample has count 0, as has
    one of the refused rows; one with draft tokens has those accepted and one more.

    One that is held to a grammar may have 0 where a sample was asked for: what may come next was not known in time, and
    the step does not wait for it.  The worker then stands one computed token further back.
    """

    epoch: int
    step_id: int
    num_sampled: list[int]
    sampled_token_ids: list[int]  # concatenated
    logprobs: list[TokenLogprobs | None] = []  # one per sampled token where any sequence asked, else empty
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # entry index -> positions computed by this chunk
    device_time: float = 0.0  # seconds
    refused: dict[int, str] = {}  # entry index -> why its grammar cannot be followed; it has no sample, now or later
    embeddings: dict[int, bytes] = {}  # entry index -> its prompt's, packed float32, with its sample
    refused_rows: list[RefusedRow] = []
    num_head_drafts: list[int] = []  # parallel to the plan's rows: what its head drafts behind them; empty: nothing
    head_draft_ids: list[int] = []  # concatenated


class ReportHoldings(Message, frozen=True):
    """Scheduler -> worker, in order with the plans: report what you hold once the plans before this have run."""

    epoch: int
    report_id: int
    next_step_id: int  # of the plans, those before it were sent before this


class Holdings(Message, frozen=True):
    """Worker -> scheduler, in order with the results: what it has state of.  Columns are parallel, one entry per row.

    Said when asked, and unasked (report_id 0) when a plan comes before the one that is due: that one is lost.
    """

    epoch: int
    report_id: int
    next_step_id: int  # as asked; or of the plan that came too early
    due_step_id: int  # of the plan that is to be run next
    rows: list[int] = []
    digests: list[int] = []  # of each row's blocks and their generations, in all pools: shared.block_digest
