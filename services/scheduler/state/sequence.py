"""The scheduler's state of one request and its sequences."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import msgspec

from services.scheduler.blocks.prefix_cache import chained, extend_hashes, root_hash
from services.scheduler.blocks.retention import Retention
from services.scheduler.blocks.sliding import SlidingTable
from services.scheduler.state.beam_search import BeamSearch
from services.scheduler.state.fairness import share_of
from shared.messages import AdmittedSequence, FinishReason, RequestHeader, TokenLogprobs
from shared.packing import pack_tokens
from shared.requests.pooling import PoolingKind
from shared.requests.sampling import SamplingParams

MAX_PREEMPTIONS = 3
MAX_WORKER_DEATHS = 2
MAX_DEATHS_TAKEN_BACK = 8  # at one point: what silences worker after worker for a while is a cause too
BEHIND_ALL = 2.0**48  # what is added to the priority and age of background sequences
Rank = tuple[float, int, int]  # priority and age, order of arrival, place among its siblings


class Table(NamedTuple):
    """A sequence's blocks in one pool of its worker, those of places `first` and on."""

    first: int
    block_ids: list[int]
    generations: list[int]


class Status(IntEnum):
    WAITING = 0  # never ran, or was preempted
    RUNNING = 1  # holds a row and blocks
    FINISHED = 2


@dataclass(eq=False, slots=True)
class Request:
    """What was asked for, once; its n sequences share it."""

    header: RequestHeader
    params: SamplingParams
    prompt_token_ids: list[int]
    eos_token_ids: list[int]
    arrival: int  # order of arrival at the scheduler
    detokenizer: str = ""  # "" while no detokenizer lives
    sequences: list[Sequence] = field(default_factory=list)
    num_worker_deaths: int = 0  # in a row, in flight at each and without a new token in between
    num_tokens_at_death: int = -1
    num_deaths_taken_back: int = 0  # without a new token in between
    finished_time: float | None = None  # when it was first seen finished and not acknowledged
    packed_prompt: bytes = b""  # prompt_token_ids as they came; made where they did not
    max_model_len: int = sys.maxsize  # of the deployment when this was let in; later workers may have another
    fingerprint: str = ""  # name of that of the worker that makes its output; "" before one has begun

    def __post_init__(self) -> None:
        eos_ids = () if self.params.ignore_eos else self.eos_token_ids
        self.end_ids = frozenset((*self.params.stop_token_ids, *eos_ids))
        self.is_background = self.header.is_background
        self.tenant = share_of(self.header.tenant, is_background=self.is_background)
        self.adapter = self.header.adapter.digest if self.header.adapter is not None else ""
        self.root = root_hash(self.header.cache_salt, self.adapter)
        seconds = self.header.retention
        self.retention = Retention(self.header.tenant, seconds) if seconds > 0 else None
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.packed_prompt = self.packed_prompt or pack_tokens(self.prompt_token_ids)
        self.min_length = self.num_prompt_tokens + self.params.min_tokens
        self.max_length = min(self.num_prompt_tokens + (self.params.max_tokens or 1), self.max_model_len)
        self.is_gathered = self.header.is_gathered and not self.params.stop  # that is looked for in what is sent on
        self.step_params = self.params
        if self.params.beam is not None:
            self.search = BeamSearch(self.params.beam, self.end_ids, self.params.logprobs)
            self.step_params = msgspec.structs.replace(
                self.params, logprobs=self.search.num_candidates, min_tokens=0, speculate=False
            )

    is_background: bool = field(init=False)
    tenant: str = field(init=False)  # among which it shares: background requests of a tenant have a share of their own
    adapter: str = field(init=False)  # digest; empty: the base model
    end_ids: frozenset[int] = field(init=False)  # tokens that end a sequence
    retention: Retention | None = field(init=False)  # of its blocks, beyond its own end
    root: bytes = field(init=False)  # parent of the names of its first blocks
    num_prompt_tokens: int = field(init=False)
    min_length: int = field(init=False)  # of prompt and output; before it no token ends a sequence
    max_length: int = field(init=False)  # of prompt and output; a sequence of this length has ended
    is_gathered: bool = field(init=False)  # whether tokens are sent on in groups
    step_params: SamplingParams = field(init=False)  # what workers are asked
    search: BeamSearch | None = field(init=False, default=None)

    @property
    def num_sequences(self) -> int:
        """How many there are while it runs."""
        return self.params.n if self.search is None else self.search.beam.width

    @property
    def described(self) -> dict[str, object]:
        """For its trace."""
        adapter = self.header.adapter
        named = {} if adapter is None else {"adapter": adapter.name}
        return {"num_prompt_tokens": self.num_prompt_tokens, **named}

    @property
    def request_id(self) -> str:
        return self.header.request_id

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.num_output_tokens for sequence in self.sequences)

    def let_go(self) -> None:
        """Forget a request that is over.  A request and its sequences name each other; without this their memory,
        tokens and hashes included, would wait for a collection of cycles, which an actor makes rarely."""
        self.sequences.clear()

    def count_death(self) -> None:
        """A worker died while it computed this.  Only deaths at the same point count together: a request that kills
        workers does so at the same point again; one that advanced in between was only a bystander."""
        num_tokens = self.num_output_tokens
        if num_tokens > self.num_tokens_at_death:
            self.num_worker_deaths = self.num_deaths_taken_back = 0
        self.num_worker_deaths += 1
        self.num_tokens_at_death = num_tokens

    def take_back_death(self, num_tokens: int) -> None:
        """The worker that was counted as dead when there were so many output tokens lives."""
        if num_tokens == self.num_tokens_at_death and self.num_deaths_taken_back < MAX_DEATHS_TAKEN_BACK:
            self.num_worker_deaths -= 1
            self.num_deaths_taken_back += 1

    @property
    def bound_to(self) -> str:
        """The fingerprint of the only workers that may go on with it: others would change its text in the middle."""
        return self.fingerprint if self.num_output_tokens else ""

    @property
    def is_quarantined(self) -> bool:
        """Whether workers died again and again at the point where it is now."""
        return self.num_worker_deaths >= MAX_WORKER_DEATHS and self.num_output_tokens == self.num_tokens_at_death

    @property
    def is_finished(self) -> bool:
        return not self.unfinished

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not Status.FINISHED]


@dataclass(eq=False, slots=True)
class Sequence:
    """One generation.

    num_computed_tokens chases num_tokens + num_pending: there is no prefill and no decode, only how far behind a
    sequence is.  It counts tokens of plans that are sent, not only of results that have come back.

    These are the fields that every sequence needs; what only one feature keeps of some is in that feature's side table.
    """

    request: Request
    index: int
    rank: Rank  # smaller runs earlier
    token_ids: list[int]  # prompt and known output
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_pending: int = 0  # samples asked for in steps in flight
    num_in_flight: int = 0  # steps in flight with a part of this
    row: int = -1
    worker: str = ""
    block_ids: list[int] = field(default_factory=list)
    block_generations: list[int] = field(default_factory=list)  # parallel: in which of its lives each block is ours
    sliding: list[SlidingTable] = field(init=False, default_factory=list)  # of its worker's sliding pools
    hashes_by_size: dict[int, list[bytes]] = field(default_factory=dict)  # of full blocks, by the size of a block
    num_registered_blocks: int = 0
    num_cached_tokens: int = -1  # at the first admission; -1 before
    num_preemptions: int = 0  # for want of blocks
    num_emitted: int = 0  # output tokens sent to the detokenizer
    finish_reason: FinishReason | None = None  # where its tokens ended it; a stop string is its detokenizer's finding
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def is_background(self) -> bool:
        """Whether it rests while a sequence that is none is at its worker."""
        return self.request.is_background

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def tables(self) -> list[Table]:
        """Of each pool of its worker."""
        sliding = (Table(table.first, table.block_ids, table.generations) for table in self.sliding)
        return [Table(0, self.block_ids, self.block_generations), *sliding]

    @property
    def num_behind(self) -> int:
        """Tokens that could be computed now, counting those that steps in flight will yield."""
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.request.num_prompt_tokens

    @property
    def is_protected(self) -> bool:
        """Whether it has been preempted so often that it is admitted only with all the blocks that it can need."""
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def can_verify(self) -> bool:
        """Whether it is at the point where draft tokens may follow: all its tokens known, the last not computed."""
        return self.num_computed_tokens == len(self.token_ids) - 1 and not self.num_pending

    @property
    def parent(self) -> Sequence:
        """The sibling whose prompt blocks this one can share; the first has none but itself."""
        return self.request.sequences[0]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are still owed; they go out with the first token."""
        return self.index == 0 and self.num_emitted == 0 and self.request.params.prompt_logprobs is not None

    @property
    def needs_all_states(self) -> bool:
        """Whether each of its prompt's tokens has to be computed, whatever the prefix cache has of them."""
        pooling = self.request.params.pooling
        return self.wants_prompt_logprobs or (pooling is not None and pooling.kind is PoolingKind.MEAN)

    def admitted(self, row: int) -> AdmittedSequence:
        """All that a worker or a draft needs to know of it, to begin or to begin again."""
        request, params = self.request, self.request.step_params
        if params.prompt_logprobs is not None and not self.wants_prompt_logprobs:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return AdmittedSequence(
            row=row,
            token_ids=request.packed_prompt + pack_tokens(self.token_ids[request.num_prompt_tokens :]),
            num_prompt_tokens=request.num_prompt_tokens,
            params=params,
            seed=((params.seed or 0) + self.index + 2**63) % 2**64 - 2**63,
            eos_token_ids=request.eos_token_ids,
            request_id=request.request_id,
            trace_id=request.header.trace_id,
            index=self.index,
            adapter=request.adapter,
        )

    def hash_blocks(self, block_size: int) -> list[bytes]:
        """Hashes of all blocks of this size that are full of known tokens.

        A sequence outlives its worker, and workers may differ in block size: a hash of 16 tokens must never stand for a
        block of 32, whose second half it does not cover.
        """
        hashes = self.hashes_by_size.setdefault(block_size, [])
        if not hashes:
            hashes.extend(chained(self.request.root, self.request.packed_prompt, block_size))
        if len(self.token_ids) >= (len(hashes) + 1) * block_size:
            extend_hashes(hashes, self.request.root, self.token_ids, block_size)
        return hashes
