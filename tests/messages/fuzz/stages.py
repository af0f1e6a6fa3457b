"""Each service's own actor with work in hand, and what of its state must be the same after any frame.

State is what belongs to members that were there before: their requests, streams, rows, blocks, places on the roster.
What a well-formed frame asks for itself (a request of its own, a hello of its own) is its right in a deployment whose
bus only its own members reach; `settle` takes that away again, so that a million of them fit.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from scripts.bench.common.tokens import MODEL
from services.detokenizer.main import make as make_detokenizer
from services.draft.main import make as make_draft
from services.gateway.actor import GatewayActor
from services.scheduler.invariants import check
from services.scheduler.main import make as make_scheduler
from services.store.main import make as make_store
from services.tokenizer.actor import TokenizerActor
from services.worker.actor import WorkerActor
from services.worker.plans.steps import InlineSteps
from shared.actor import Actor
from shared.config import Settings
from shared.messages import (
    AddRequest,
    AdmittedSequence,
    DraftUpdate,
    Hello,
    Member,
    Message,
    OpenStream,
    RequestHeader,
    Roster,
    SequenceText,
    SequenceTokens,
    ServiceName,
    StepPlan,
    StepResult,
    TextBatch,
    TokenBatch,
    TokenizeRequest,
    WorkerCapacity,
    schema_hash,
)
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from shared.text.model_source import resolve_model_dir
from shared.text.tokenization import load_tokenizer
from shared.transport import MemoryTransport

NEVER = 1e6  # seconds: no timer of an actor goes off meanwhile
SETTINGS = Settings.of(
    model=str(MODEL), port=0, http_port=-1, heartbeat_interval=NEVER, heartbeat_timeout=2 * NEVER,
    stall_timeout=2 * NEVER, resume_timeout=2 * NEVER, draft="ngram", max_model_len=512, max_num_seqs=8,
)  # fmt: skip
CAPACITY = WorkerCapacity(64, 16, 8, 512, 4096, "stories", "float32", "cpu")
PARAMS = SamplingParams(max_tokens=200, seed=1).resolved(GenerationDefaults(), max_tokens=200)
PROMPT = pack_tokens(range(40))
NAMES = {name: f"stage-{name.value}" for name in ServiceName}  # of instances; no frame of a stranger has one
REQUESTS = ("healthy-0", "healthy-1", "healthy-2", "healthy-3")


def address(name: str) -> str:
    return f"memory://{name}"


class Stage(ABC):
    """One actor among bare inboxes."""

    def __init__(self) -> None:
        self.network = MemoryTransport()
        self.epoch = time.time_ns() // 1000
        self.actor: Any = self.make()

    @abstractmethod
    def make(self) -> Actor:
        """The actor, with work in hand to come."""

    def prepare(self) -> list[Message]:
        """What its work in hand begins with."""
        return []

    @abstractmethod
    def digest(self) -> object:
        """Equal before and after, where nothing of the others' state has changed."""

    def settle(self) -> None:
        """Take away what strangers have asked for themselves."""

    async def close(self) -> None:
        """The actor has ended, or was cancelled."""
        self.network.close()

    @property
    def known(self) -> list[str | int]:
        """Ids, addresses and epochs that mean something here: what an insider would know."""
        return [*REQUESTS, *map(address, NAMES.values()), *NAMES.values(), self.epoch, self.actor.instance]

    def roster(self) -> Roster:
        members = [Member(service, name, address(name), self.epoch) for service, name in NAMES.items()]
        me = Member(self.actor.service, self.actor.instance, self.actor.inbox.address, self.actor.epoch)
        return Roster(self.epoch, 5, [*members, me], CAPACITY, 512, 511)

    def standing(self) -> tuple[Any, ...]:
        """Of any member: in which life, with whom."""
        return self.actor.phase, self.actor.epoch, self.actor.roster


def header(request_id: str) -> RequestHeader:
    return RequestHeader(request_id, address(NAMES[ServiceName.GATEWAY]), tenant="acme")


class SchedulerStage(Stage):
    """Four requests at one worker, two steps in flight."""

    def make(self) -> Actor:
        return make_scheduler(self.network, SETTINGS)

    def prepare(self) -> list[Message]:
        hellos = [
            Hello(
                service,
                name,
                address(name),
                self.epoch,
                schema_hash(),
                CAPACITY if service is ServiceName.WORKER else None,
            )
            for service, name in NAMES.items()
            if service is not ServiceName.SCHEDULER
        ]
        return [*hellos, *(AddRequest(header(name), PARAMS, PROMPT, [0]) for name in REQUESTS)]

    @property
    def known(self) -> list[str | int]:
        return [*super().known, *(replica.epoch for replica in self.actor.core.replicas.values()), schema_hash()]

    def digest(self) -> object:
        core = self.actor.core
        check(core)
        replica = core.replicas[NAMES[ServiceName.WORKER]]
        return (
            [self._request(core.requests[name]) for name in REQUESTS],
            (replica.epoch, replica.num_steps, [s.step_id for s in replica.in_flight], replica.pool.ref_counts[:]),
            [member for member in self.actor.membership.members if member.instance in NAMES.values()],
            (self.actor.phase, core.intake.capacity, core.intake.max_model_len),
        )

    def _request(self, request: Any) -> tuple[Any, ...]:
        return request.header, request.params, request.detokenizer, [
            (s.status, s.row, s.worker, tuple(s.token_ids), tuple(s.block_ids), s.num_computed_tokens, s.num_pending)
            for s in request.sequences
        ]  # fmt: skip

    def settle(self) -> None:
        for request_id in [
            name for name in (*self.actor.core.requests, *self.actor.core.finished) if name not in REQUESTS
        ]:
            self.actor.core.abort(request_id)
        for member in self.actor.membership.members:
            if member.instance not in NAMES.values():
                self.actor._lose(member, "a stranger")


class GatewayStage(Stage):
    """Four streams that have begun."""

    def make(self) -> Actor:
        return GatewayActor(self.network, SETTINGS)

    def prepare(self) -> list[Message]:
        return [self.roster()]

    def begin(self) -> list[Message]:
        for name in REQUESTS:
            self.actor.generation.open(TokenizeRequest(header(name), PARAMS, token_ids=PROMPT))
        return [TextBatch([SequenceText(name, 0, 0, 0, "Once", [7]) for name in REQUESTS])]

    def digest(self) -> object:
        generation = self.actor.generation
        told = [
            (s.error, s.tokenizer, [(q.token_ids.tolist(), q.num_chars, q.finished) for q in s.sequences])
            for s in map(generation.journal.get, REQUESTS)
        ]
        counts = len(generation.journal), len(generation.calls)
        return told, self.standing(), counts, self.actor.readiness.unwell


class TokenizerStage(Stage):
    """Without a chat template: rendering is done by children, which the poison corpus goes through."""

    def make(self) -> Actor:
        return TokenizerActor(self.network, SETTINGS, load_tokenizer(resolve_model_dir(SETTINGS.engine.model)), None)

    def prepare(self) -> list[Message]:
        return [self.roster()]

    def digest(self) -> object:
        return self.standing(), self.actor.max_model_len, self.actor.max_input_length

    def settle(self) -> None:
        self.actor.pending.clear()

    async def close(self) -> None:
        """A frame may have asked for a grammar, for which processes begin."""
        await self.actor.compilers.close()
        await self.actor.encoders.close()
        await super().close()


class DetokenizerStage(Stage):
    """Four streams that have begun."""

    def make(self) -> Actor:
        return make_detokenizer(self.network, SETTINGS)

    def prepare(self) -> list[Message]:
        opened = [OpenStream(header(name), 0, 3, [1, 2, 3], ["end"], False, True, True, 0) for name in REQUESTS]
        tokens = [SequenceTokens(name, 0, 0, [50, 60]) for name in REQUESTS]
        return [self.roster(), TokenBatch(opened, tokens)]

    def digest(self) -> object:
        streams = [self.actor.table.streams[name, 0] for name in REQUESTS]
        return [(s.opened, s.num_tokens, s.num_characters, s.finish_reason) for s in streams], self.standing()

    def settle(self) -> None:
        for key in [key for key in self.actor.table.streams if key[0] not in REQUESTS]:
            del self.actor.table.streams[key]


class RowsRunner:
    """A model runner that keeps what it was told to do."""

    capacity = CAPACITY
    fingerprint = None
    no_native = ""
    adapters = None
    blocks = None

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []

    def reset(self) -> None:
        self.done.append((0, 0))

    def holdings(self) -> tuple[list[int], list[int]]:
        return [0], [0]

    def run(self, plan: StepPlan) -> StepResult:
        self.done.append((plan.epoch, plan.step_id))
        return StepResult(plan.epoch, plan.step_id, [1] * len(plan.rows), [5] * len(plan.rows))


class WorkerStage(Stage):
    """One plan has run."""

    def make(self) -> Actor:
        self.rows: Any = RowsRunner()
        return WorkerActor(self.network, SETTINGS, lambda: self.rows, InlineSteps)

    def prepare(self) -> list[Message]:
        admitted = [AdmittedSequence(0, PROMPT, 40, PARAMS, 1, [0], REQUESTS[0])]
        plan = StepPlan(
            self.epoch, 0, admitted, [0], [0], [40], [3], [0, 1, 2], [], [], new_block_generations=[1, 1, 1]
        )
        return [self.roster(), plan]

    def digest(self) -> object:
        return list(self.rows.done), self.standing()


class DraftStage(Stage):
    """Prompt lookup that follows one row."""

    def make(self) -> Actor:
        return make_draft(self.network, SETTINGS)

    def prepare(self) -> list[Message]:
        opened = [AdmittedSequence(0, PROMPT, 40, PARAMS, 1, [0], REQUESTS[0])]
        return [self.roster(), DraftUpdate(self.epoch, 1, [], opened, [0], [40], [0], [], [0])]

    def digest(self) -> object:
        session = self.actor._executor._computation
        return dict(session._num_told), session._epoch, session._update_id, self.standing()


class StoreStage(Stage):
    """A store that is empty: what it holds comes by no message."""

    def make(self) -> Actor:
        directory = tempfile.mkdtemp(prefix="pageant-stage-")
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        return make_store(self.network, SETTINGS.replace(store_memory=1 << 20, runtime_dir=directory))

    def prepare(self) -> list[Message]:
        return [self.roster()]

    def digest(self) -> object:
        return self.actor.arena.num_bytes, self.standing()


STAGES: dict[str, Callable[[], Stage]] = {
    "gateway": GatewayStage,
    "tokenizer": TokenizerStage,
    "scheduler": SchedulerStage,
    "detokenizer": DetokenizerStage,
    "worker": WorkerStage,
    "draft": DraftStage,
    "store": StoreStage,
}
