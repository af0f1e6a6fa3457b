"""A worker without a model: it checks every plan against a physical pool of its own, and its tokens are a pure
function of history and seed, so that every request's output is known beforehand.

What keeps plans and rows apart is the worker's own: the line of plans and the fence of blocks."""

from __future__ import annotations

from hashlib import blake2b

from engine.execution.block_fence import BlockFence
from engine.execution.partial import completed, without
from services.worker.plan_sequencer import PlanSequencer, Work
from shared.messages import AdmittedSequence, Holdings, StepPlan, StepResult, WorkerCapacity
from shared.packing import unpack_tokens

VOCAB = 50


def next_token(history: list[int], seed: int) -> int:
    digest = blake2b(repr((history, seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def capacity(
    num_blocks: int = 64, block_size: int = 8, max_num_seqs: int = 16, max_model_len: int = 128
) -> WorkerCapacity:
    return WorkerCapacity(num_blocks, block_size, max_num_seqs, max_model_len, VOCAB, "fake", "float32", "cpu")


class Row:
    def __init__(self, sequence: AdmittedSequence) -> None:
        self.tokens = unpack_tokens(sequence.token_ids)
        self.seed = sequence.seed
        self.table: list[int] = []
        self.num_computed = -1


def drafts_of(plan: StepPlan) -> list[list[int]]:
    """Draft tokens by entry."""
    tokens = iter(plan.draft_token_ids)
    found = [[next(tokens) for _ in range(count)] for count in plan.num_draft_tokens or [0] * len(plan.rows)]
    assert next(tokens, None) is None, "draft tokens of no entry"
    return found


class FakeWorker:
    """Executes plans in order.  A slot of the pool holds the history that its key and value would depend on."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        self.capacity = capacity
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.rows: dict[int, Row] = {}
        self.step_tokens: list[int] = []
        self.fence = BlockFence(capacity.max_num_seqs, capacity.num_blocks, capacity.block_size)
        self.line = PlanSequencer(self)
        self.forgotten: set[int] = set()  # rows whose state it has lost

    def reset(self) -> None:
        self.rows.clear()
        self.fence.reset()

    def holdings(self) -> tuple[list[int], list[int]]:
        return self.fence.holdings()

    def take(self, work: Work) -> StepResult | Holdings | None:
        """What comes over the link, whatever it is, and what to answer."""
        turn = self.line.take(work)
        return self.run(turn) if isinstance(turn, StepPlan) else turn

    def run(self, plan: StepPlan) -> StepResult:
        refused = self.fence.read(plan)
        self._copy(self.fence.keeps(plan, refused))
        for row in plan.released_rows:
            self.rows.pop(row, None)
        for admitted in plan.admitted:
            self.rows[admitted.row] = Row(admitted)
            self.forgotten.discard(admitted.row)
        stale = {one.entry for one in refused}
        refused += [
            self.fence.refuse(plan, entry)
            for entry, row in enumerate(plan.rows)
            if row in self.forgotten and entry not in stale
        ]
        self._extend(plan)
        if not refused:
            return self._compute(plan)
        part = without(plan, {one.entry for one in refused})
        return completed(self._compute(part), refused, len(plan.rows))

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        for source, destination in copies:
            for offset in range(self.capacity.block_size):
                self.slots.pop((destination, offset), None)
                if (source, offset) in self.slots:
                    self.slots[destination, offset] = self.slots[source, offset]

    def _extend(self, plan: StepPlan) -> None:
        cursor = 0
        for row, count in zip(plan.rows, plan.num_new_blocks, strict=True):
            self.rows[row].table += plan.new_block_ids[cursor : cursor + count]
            cursor += count
        assert cursor == len(plan.new_block_ids)
        assert len(set(plan.rows)) == len(plan.rows)

    def _compute(self, plan: StepPlan) -> StepResult:
        rows = [self.rows[row] for row in plan.rows]
        columns = list(zip(rows, plan.num_computed_tokens, plan.num_scheduled_tokens, drafts_of(plan), strict=True))
        self.step_tokens.append(sum(plan.num_scheduled_tokens))
        for part in columns:
            self._write(*part)
        sampled = [self._attend(*part) for part in columns]
        tokens = [token for some in sampled for token in some]
        return StepResult(plan.epoch, plan.step_id, [len(some) for some in sampled], tokens)

    def _write(self, row: Row, computed: int, scheduled: int, drafts: list[int]) -> None:
        tokens = row.tokens + drafts
        assert row.num_computed in (-1, computed), "scheduler and worker disagree on what is computed"
        assert 0 < scheduled <= len(tokens) - computed, "tokens are scheduled that do not exist"
        assert not drafts or computed + scheduled == len(tokens), "drafts that are not verified"
        row.num_computed = computed + scheduled
        for position in range(computed, computed + scheduled):
            self.slots[self._slot(row, position)] = tuple(tokens[: position + 1])

    def _attend(self, row: Row, computed: int, scheduled: int, drafts: list[int]) -> list[int]:
        tokens = row.tokens + drafts
        for position in range(computed + scheduled):
            expected = tuple(tokens[: position + 1])
            assert self.slots.get(self._slot(row, position)) == expected, "stale or foreign keys and values"
        if computed + scheduled < len(tokens):
            return []
        sampled = [next_token(row.tokens, row.seed)]
        while len(sampled) <= len(drafts) and sampled[-1] == drafts[len(sampled) - 1]:
            sampled.append(next_token(row.tokens + sampled, row.seed))
        row.num_computed -= len(drafts) - (len(sampled) - 1)
        row.tokens += sampled
        return sampled

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        size = self.capacity.block_size
        return row.table[position // size], position % size
