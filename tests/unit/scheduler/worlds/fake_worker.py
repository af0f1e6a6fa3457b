"""A worker without a model: it checks every plan against a physical pool of its own, and its tokens are a pure
function of history and seed, so that every request's output is known beforehand.

What keeps plans and rows apart is the worker's own: the line of plans and the fence of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

import numpy as np

from engine.execution.outputs.partial import completed, without
from engine.execution.tables.block_fence import BlockFence
from engine.execution.tables.row_states import Ints, RowStates
from services.worker.blocks.block_desk import Arrived, BlockDesk
from services.worker.plans.plan_sequencer import PlanSequencer, Work
from shared.data_link.copying import Copy
from shared.messages import (
    AdmittedSequence,
    BlocksMoved,
    FetchBlocks,
    Holdings,
    OfferBlocks,
    ServeBlocks,
    SlidingPlan,
    SlidingPool,
    StepPlan,
    StepResult,
    WorkerCapacity,
    WorkerRole,
)
from shared.packing import unpack_tokens

VOCAB = 50
BLOCK_BYTES = 1 << 20  # a block of a fake worker has none, but says so


def next_token(history: list[int], seed: int, adapter: str = "") -> int:
    named = (history, seed, adapter) if adapter else (history, seed)
    digest = blake2b(repr(named).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def capacity(
    num_blocks: int = 64,
    block_size: int = 8,
    max_num_seqs: int = 16,
    max_model_len: int = 128,
    sliding: tuple[tuple[int, int], ...] = (),
    num_snapshots: int | None = None,
    block_space: bytes = b"",
    role: WorkerRole = WorkerRole.BOTH,
    max_head_drafts: int = 0,
) -> WorkerCapacity:
    """`sliding`: windows and numbers of blocks; `num_snapshots`: of states, None where none are kept; `block_space`:
    where blocks move; `max_head_drafts`: of a draft head, 0 where there is none."""
    pools = [SlidingPool(*one) for one in sliding]
    return WorkerCapacity(
        num_blocks, block_size, max_num_seqs, max_model_len, VOCAB, "fake", "float32", "cpu", sliding=pools,
        keeps_states=num_snapshots is not None, num_snapshots=num_snapshots or 0,
        block_space=block_space, block_bytes=BLOCK_BYTES if block_space else 0, role=role,
        max_head_drafts=max_head_drafts,
    )  # fmt: skip


class Row:
    def __init__(self, sequence: AdmittedSequence, num_pools: int) -> None:
        self.tokens = unpack_tokens(sequence.token_ids)
        self.seed = sequence.seed
        self.adapter = sequence.adapter
        self.limit = sequence.num_prompt_tokens + (sequence.params.max_tokens or 1)  # tokens
        self.may_speculate = sequence.params.speculate
        self.tables: list[dict[int, int]] = [{} for _ in range(num_pools)]  # blocks by place
        self.ends = [0] * num_pools
        self.firsts = [0] * num_pools
        self.num_computed = -1


def _seen(row: Row, tokens: list[int]) -> tuple[int | str, ...]:
    """What a key and a value depend on."""
    return (row.adapter, *tokens) if row.adapter else tuple(tokens)


def drafts_of(plan: StepPlan) -> list[list[int]]:
    """Draft tokens by entry."""
    tokens = iter(plan.draft_token_ids)
    found = [[next(tokens) for _ in range(count)] for count in plan.num_draft_tokens or [0] * len(plan.rows)]
    assert next(tokens, None) is None, "draft tokens of no entry"
    return found


class FakeStates:
    """A state is the history that it has seen; a place without one has that of no sequence."""

    def __init__(self, count: int) -> None:
        self.states: list[tuple[int, ...]] = [(-1,)] * count

    def copy_states(self, sources: Ints, destinations: Ints) -> None:
        taken = [self.states[source] for source in sources.tolist()]
        for destination, state in zip(destinations.tolist(), taken, strict=True):
            self.states[destination] = state


Content = tuple[tuple[int | str, ...] | None, ...]


class FakeBlocks:
    """Blocks of a fake worker's first pool, as `engine.execution.tables.block_access.BlockAccess` has those of a
    real one.
    """

    copy: Copy | None = None

    def __init__(self, worker: FakeWorker) -> None:
        self.space, self.block_bytes = worker.capacity.block_space, worker.capacity.block_bytes
        self._worker = worker
        self._fence = worker.fence.first

    @property
    def life(self) -> int:
        return self._fence.num_resets

    def num_agreeing(self, blocks: Sequence[int], generations: Sequence[int]) -> int:
        return self._fence.num_agreeing(blocks, generations)

    def read(self, blocks: Sequence[int], generations: Sequence[int]) -> list[Content]:
        size, slots = self._worker.capacity.block_size, self._worker.slots
        count = self._fence.num_agreeing(blocks, generations)
        return [tuple(slots.get((0, block, offset)) for offset in range(size)) for block in blocks[:count]]

    def claim(self, blocks: Sequence[int], generations: Sequence[int]) -> int:
        return self._fence.claim(blocks, generations)

    def write(self, blocks: Sequence[int], generations: Sequence[int], data: list[Content]) -> int:
        count = self._fence.num_agreeing(blocks, generations)
        for block, content in zip(blocks[:count], data, strict=False):
            for offset, history in enumerate(content):
                self._worker.slots.pop((0, block, offset), None)
                if history is not None:
                    self._worker.slots[0, block, offset] = history
        return count


class FakeCarrier:
    """Keeps what is to be carried, until the world lets it arrive."""

    def __init__(self) -> None:
        self.given: list[tuple[OfferBlocks, list[Content]]] = []
        self.wanted: list[tuple[FetchBlocks, int]] = []

    def give(self, order: OfferBlocks, data: list[Content]) -> None:
        self.given.append((order, data))

    def fetch(self, order: FetchBlocks, count: int) -> None:
        self.wanted.append((order, count))

    def release(self, data: list[Content]) -> None:
        """Nothing is used again here."""


class FakeWorker:
    """Executes plans in order.  A slot of the pool holds the history that its key and value would depend on."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        self.capacity = capacity
        self.windows = [0, *(one.window for one in capacity.sliding)]  # of each pool; 0: every token
        self.slots: dict[tuple[int, int, int], tuple[int | str, ...]] = {}  # by pool, block and offset
        self.rows: dict[int, Row] = {}
        self.step_tokens: list[int] = []
        sizes = [one.num_blocks for one in capacity.sliding]
        self.fence = BlockFence(capacity.max_num_seqs, capacity.num_blocks, capacity.block_size, sizes)
        self.line = PlanSequencer(self)
        self.adapters: set[str] = set()  # digests of those that it holds
        self.adapter_epoch = 0  # of the order that said so
        self.carrier = FakeCarrier()
        self.desk = BlockDesk(FakeBlocks(self), self.carrier)
        self.forgotten: set[int] = set()  # rows whose state it has lost
        num_rows, num_snapshots = capacity.max_num_seqs, capacity.num_snapshots
        self.places = FakeStates(2 * num_rows + num_snapshots)
        self.states = RowStates(self.places, num_rows, num_snapshots) if capacity.keeps_states else None

    def reset(self) -> None:
        self.rows.clear()
        if self.states is not None:
            self.states.reset()
        self.fence.reset()

    def holdings(self) -> tuple[list[int], list[int]]:
        return self.fence.holdings()

    def take(self, work: Work) -> StepResult | Holdings | BlocksMoved | None:
        """What comes over the link, whatever it is, and what to answer."""
        turn = self.line.take(work)
        if isinstance(turn, OfferBlocks | FetchBlocks | ServeBlocks | Arrived):
            return next(iter(self.desk.take(turn)), None)
        return self.run(turn) if isinstance(turn, StepPlan) else turn

    def run(self, plan: StepPlan) -> StepResult:
        refused = self.fence.read(plan)
        for pool, copies in enumerate(self.fence.keeps(plan, refused)):
            self._copy(pool, copies)
        for row in plan.released_rows:
            self.rows.pop(row, None)
        for admitted in plan.admitted:
            self.rows[admitted.row] = Row(admitted, len(self.windows))
            self.forgotten.discard(admitted.row)
        if self.states is not None:
            self.states.begin(plan)
        stale = {one.entry for one in refused}
        refused += [
            self.fence.refuse(plan, entry)
            for entry, row in enumerate(plan.rows)
            if (row in self.forgotten or self._has_no_state(plan, entry)) and entry not in stale
        ]
        self._extend(plan)
        part = without(plan, {one.entry for one in refused}) if refused else plan
        result = self._compute(part)
        if self.states is not None and plan.state_saves:
            self.states.save(plan, part.rows)
        return completed(result, refused, len(plan.rows)) if refused else result

    def _has_no_state(self, plan: StepPlan, entry: int) -> bool:
        row, computed = np.array(plan.rows[entry : entry + 1]), np.array(plan.num_computed_tokens[entry : entry + 1])
        return self.states is not None and bool(self.states.contradicts(row, computed).any())

    def _copy(self, pool: int, copies: list[tuple[int, int]]) -> None:
        for source, destination in copies:
            for offset in range(self.capacity.block_size):
                self.slots.pop((pool, destination, offset), None)
                if (pool, source, offset) in self.slots:
                    self.slots[pool, destination, offset] = self.slots[pool, source, offset]

    def _extend(self, plan: StepPlan) -> None:
        assert len(set(plan.rows)) == len(plan.rows)
        assert len(plan.sliding) in (0, len(self.windows) - 1)
        for pool, sliding in enumerate(plan.sliding, 1):
            for row, count in zip(plan.rows, sliding.num_left_blocks, strict=True):
                self._leave(self.rows[row], pool, count)
        parts: list[StepPlan | SlidingPlan] = [plan, *plan.sliding]
        for pool, part in enumerate(parts):
            cursor = 0
            for row, count in zip(plan.rows, part.num_new_blocks, strict=True):
                self._append(self.rows[row], pool, part.new_block_ids[cursor : cursor + count])
                cursor += count
            assert cursor == len(part.new_block_ids)

    def _leave(self, row: Row, pool: int, count: int) -> None:
        row.firsts[pool] += count
        row.ends[pool] = max(row.ends[pool], row.firsts[pool])
        for place in [place for place in row.tables[pool] if place < row.firsts[pool]]:
            del row.tables[pool][place]

    def _append(self, row: Row, pool: int, block_ids: list[int]) -> None:
        row.tables[pool] |= dict(enumerate(block_ids, row.ends[pool]))
        row.ends[pool] += len(block_ids)

    def _compute(self, plan: StepPlan) -> StepResult:
        rows = [self.rows[row] for row in plan.rows]
        columns = list(zip(rows, plan.num_computed_tokens, plan.num_scheduled_tokens, drafts_of(plan), strict=True))
        self.step_tokens.append(sum(plan.num_scheduled_tokens))
        if plan.epoch >= self.adapter_epoch:  # what an earlier life was sent is of no use to anyone
            assert {row.adapter for row in rows} - {""} <= self.adapters, "a row's adapter is not here"
        for part in columns:
            self._write(*part)
        before = [list(row.tokens) for row in rows]
        sampled = [self._attend(*part) for part in columns]
        if self.states is not None:
            for row, tokens, part, some in zip(plan.rows, before, columns, sampled, strict=True):
                self._pass_state(self.states, row, tokens, part[1:], len(some))
        drafted = self._draft(plan, rows, sampled)
        counts, num_drafts = [len(some) for some in sampled], [len(some) for some in drafted]
        tokens, drafts = list(chain.from_iterable(sampled)), list(chain.from_iterable(drafted))
        return StepResult(plan.epoch, plan.step_id, counts, tokens, num_head_drafts=num_drafts, head_draft_ids=drafts)

    def _draft(self, plan: StepPlan, rows: list[Row], sampled: list[list[int]]) -> list[list[int]]:
        """What the draft head guesses behind each part that is sampled; three tokens of four are right."""
        drafted: list[list[int]] = []
        assert len(plan.num_wanted_drafts) in (0, len(rows))
        for row, some, count in zip(rows, sampled, plan.num_wanted_drafts, strict=False):
            assert 0 <= count <= self.capacity.max_head_drafts, "more drafts than the head makes"
            assert not count or (some and row.may_speculate), "drafts behind nothing, or of a plain row"
            first = len(row.tokens) - len(some) + 1  # with the first of them, whatever else was accepted
            assert not count or first + count < row.limit, "drafts of tokens that cannot come"
            guess: list[int] = []
            while len(guess) < count:
                right = next_token(row.tokens + guess, row.seed, row.adapter)
                guess.append(right if (right + len(row.tokens)) % 4 else (right + 1) % VOCAB)
            drafted.append(guess)
        return drafted

    def _pass_state(
        self, states: RowStates, row: int, tokens: list[int], part: tuple[int, int, list[int]], num_sampled: int
    ) -> None:
        """Through the tokens of the step, and back where drafts were not accepted."""
        (computed, scheduled, drafts), rows = part, np.array([row])
        first, end = np.array([computed]), np.array([computed + scheduled])
        if drafts:
            states.keep(rows, first)
        begin = computed - int(states.behind(rows, first)[0])
        assert not begin or self.places.states[row] == tuple(tokens[:begin]), "a state of other tokens"
        self.places.states[row] = (*tokens, *drafts)[: computed + scheduled]
        states.advance(rows, end)
        if num_sampled <= len(drafts) and drafts:
            states.put_back(rows, end - (len(drafts) - num_sampled + 1))

    def _write(self, row: Row, computed: int, scheduled: int, drafts: list[int]) -> None:
        tokens = row.tokens + drafts
        assert row.num_computed in (-1, computed), "scheduler and worker disagree on what is computed"
        assert 0 < scheduled <= len(tokens) - computed, "tokens are scheduled that do not exist"
        assert not drafts or computed + scheduled == len(tokens), "drafts that are not verified"
        row.num_computed = computed + scheduled
        for pool in range(len(self.windows)):
            for position in range(computed, computed + scheduled):
                self.slots[self._slot(row, pool, position)] = _seen(row, tokens[: position + 1])

    def _attend(self, row: Row, computed: int, scheduled: int, drafts: list[int]) -> list[int]:
        tokens = row.tokens + drafts
        for pool, window in enumerate(self.windows):
            for position in range(max(0, computed - window + 1) if window else 0, computed + scheduled):
                expected = _seen(row, tokens[: position + 1])
                assert self.slots.get(self._slot(row, pool, position)) == expected, "stale or foreign keys and values"
        if computed + scheduled < len(tokens):
            return []
        sampled = [next_token(row.tokens, row.seed, row.adapter)]
        while len(sampled) <= len(drafts) and sampled[-1] == drafts[len(sampled) - 1]:
            sampled.append(next_token(row.tokens + sampled, row.seed, row.adapter))
        row.num_computed -= len(drafts) - (len(sampled) - 1)
        row.tokens += sampled
        return sampled

    def _slot(self, row: Row, pool: int, position: int) -> tuple[int, int, int]:
        size = self.capacity.block_size
        assert position // size in row.tables[pool], "a token's block was given up, or never came"
        return pool, row.tables[pool][position // size], position % size
