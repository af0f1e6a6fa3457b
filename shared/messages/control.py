"""Membership: which processes exist, where, and which are leaving."""

from __future__ import annotations

from enum import StrEnum

from shared.messages.adapters import Adapter
from shared.messages.base import Message
from shared.messages.drafts import DraftCapacity
from shared.messages.fingerprint import Fingerprint
from shared.messages.moves import MoveCounts, StoreCapacity


class ServiceName(StrEnum):
    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    DETOKENIZER = "detokenizer"
    DRAFT = "draft"
    STORE = "store"


class WorkerRole(StrEnum):
    """What a worker is preferred for; where no worker has a role, the others do its work."""

    BOTH = "both"
    PREFILL = "prefill"  # the full blocks of prompts, which others then fetch
    DECODE = "decode"


class SlidingPool(Message, frozen=True):
    """Blocks of the layers that see a window of the latest tokens only: a sequence holds those of its window."""

    window: int  # tokens that a query sees, itself included
    num_blocks: int


class WorkerCapacity(Message, frozen=True):
    """What a worker offers.  Where workers may not be mixed, all of a deployment agree on all but num_blocks."""

    num_blocks: int  # for all layers but those of `sliding`
    block_size: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    model: str
    dtype: str
    device: str
    fingerprint: str = ""  # its name: workers of the same one give the same bits; the scheduler sets it
    sliding: list[SlidingPool] = []  # by window, the smallest first; empty: all layers share the blocks above
    keeps_states: bool = False  # of each row, which a prefix in blocks alone cannot bring back
    num_snapshots: int = 0  # of states, that plans may have saved and loaded
    max_loras: int = 0  # adapters of one step; 0: none are served
    num_held_loras: int = 0  # adapters that it holds at most
    labels: list[str] = []  # that its model gives scores to; empty: it generates
    block_space: bytes = b""  # digest of all that a block's bytes depend on but its name; empty: blocks do not move
    block_bytes: int = 0  # of one block, in all layers
    role: WorkerRole = WorkerRole.BOTH
    max_head_drafts: int = 0  # that it drafts itself for a sequence; 0: it has no draft head


class Hello(Message, frozen=True):
    """An instance announces itself, at start and again whenever it was forgotten.  A new epoch is a new life."""

    service: ServiceName
    instance: str  # unique per process life
    address: str
    epoch: int
    schema_hash: str
    worker: WorkerCapacity | None = None
    draft: DraftCapacity | None = None
    fingerprint: Fingerprint | None = None  # of a worker, and the text parts of those that have the tokenizer
    alive: list[Fingerprint] = []  # of a gateway: those of the workers that began the streams that are open there
    newest_epoch: int = 0  # the greatest epoch of a scheduler or of a link that it knows
    adapters: list[Adapter] = []  # of a gateway: those that requests may name
    store: StoreCapacity | None = None  # of a store; of a worker: where it serves its blocks to others


class Heartbeat(Message, frozen=True):
    service: ServiceName
    instance: str
    epoch: int
    progress: int = 0  # steps or messages handled; stands still when stuck
    address: str = ""  # where a scheduler that does not know the sender can say so
    stalled: str = ""  # why work waits there without progress
    is_computing: bool = False  # a step is under way, and has not taken longer than such a step may
    alive: list[str] = []  # of a gateway, as in Hello: the names
    newest_epoch: int = 0  # as in Hello


class Goodbye(Message, frozen=True):
    """An instance leaves of its own will; its work is to be handed over."""

    service: ServiceName
    instance: str
    epoch: int


class Member(Message, frozen=True):
    service: ServiceName
    instance: str
    address: str
    epoch: int


class Roster(Message, frozen=True):
    """The whole membership, sent by the scheduler to all services at every change and with its heartbeat."""

    scheduler_epoch: int
    version: int
    members: list[Member]
    model: WorkerCapacity | None = None  # None until a worker is there
    max_model_len: int = 0  # tokens, prompt and output
    max_input_length: int = 0
    stalled: str = ""  # which service makes no progress although work waits, and why
    fingerprints: list[Fingerprint] = []  # of the workers, each once; of the last one while its requests are alive
    former_epochs: list[int] = []  # numbers that this very life had before it took scheduler_epoch
    adapters: list[Adapter] = []  # that requests may name, by name
    is_asleep: bool = False  # workers are away on purpose, and come when a request wants them


class Refused(Message, frozen=True):
    """The scheduler refuses this instance (another schema, another fingerprint); the instance exits with the reason."""

    instance: str
    reason: str


class Drain(Message, frozen=True):
    """Finish or hand over what you have, then stop; to oneself on SIGTERM and SIGUSR1, to all by the Drain RPC."""

    deadline: float = 0.0  # by the steady clock; 0 uses the configured drain timeout


class Tick(Message, frozen=True):
    """A timer's message to oneself."""


class Wake(Message, frozen=True):
    """A message to oneself: a time has come for which something waited."""


class PeerGone(Message, frozen=True):
    """A message to oneself: no process listens any more at an address that this one had a connection to."""

    address: str


class GetLoad(Message, frozen=True):
    """Gateway -> scheduler, answered by a Load."""

    request_id: str
    gateway: str


class WorkerLoad(Message, frozen=True):
    instance: str
    num_running: int
    num_blocks: int
    num_free_blocks: int  # never used or released without a hash
    num_cached_blocks: int  # free to take, with contents worth keeping
    num_steps: int
    fingerprint: str = ""  # its name


class Load(Message, frozen=True):
    request_id: str
    num_running: int
    num_waiting: int
    workers: list[WorkerLoad]
    num_preemptions: int
    num_prefix_cache_queries: int  # tokens
    num_prefix_cache_hits: int  # tokens
    num_chunked_prefills: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_finished: int
    num_aborted: int
    num_rejected: int
    num_block_copies: int = 0
    kv_cache_usage: float = 0.0
    num_drafts: int = 0  # times that draft tokens were verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_stale_draft_tokens: int = 0  # proposed, and never verified
    num_late_drafts: int = 0  # waited for, and not there in time
    num_accepted_tokens_per_position: list[int] = []
    num_expired: int = 0
    num_worker_losses: int = 0
    step_tokens: list[int] = []  # steps by the number of their tokens: shared.metrics.histogram.STEP_TOKENS
    step_tokens_sum: int = 0
    num_late_masks: int = 0  # samples that were put off, as what a grammar allows was not known in time
    num_background_running: int = 0  # not in num_running, nor is what they hold in kv_cache_usage
    num_background_waiting: int = 0  # not in num_waiting
    adapters: dict[str, int] = {}  # open requests by the adapter that they name, of so many names, and others
    moves: MoveCounts = MoveCounts()
