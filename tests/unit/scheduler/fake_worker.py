"""A worker without a model: it checks every plan against a physical pool of its own, and its tokens are a pure
function of history and seed, so that every request's output is known beforehand."""

from __future__ import annotations

from hashlib import blake2b

from shared.messages import AdmittedSequence, StepPlan, StepResult, WorkerCapacity
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


class FakeWorker:
    """Executes plans in order.  A slot of the pool holds the history that its key and value would depend on."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        self.capacity = capacity
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.rows: dict[int, Row] = {}
        self.step_tokens: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        size = self.capacity.block_size
        for source, destination in plan.block_copies:
            for offset in range(size):
                self.slots.pop((destination, offset), None)
                if (source, offset) in self.slots:
                    self.slots[destination, offset] = self.slots[source, offset]
        for admitted in plan.admitted:
            self.rows[admitted.row] = Row(admitted)
        cursor = 0
        for row, count in zip(plan.rows, plan.num_new_blocks, strict=True):
            self.rows[row].table += plan.new_block_ids[cursor : cursor + count]
            cursor += count
        assert cursor == len(plan.new_block_ids)
        assert len(set(plan.rows)) == len(plan.rows)
        columns = list(zip(plan.rows, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True))
        self.step_tokens.append(sum(plan.num_scheduled_tokens))
        for row, computed, scheduled in columns:
            self._write(self.rows[row], computed, scheduled)
        sampled = [self._attend(self.rows[row], computed, scheduled) for row, computed, scheduled in columns]
        tokens = [token for token in sampled if token is not None]
        return StepResult(plan.epoch, plan.step_id, [int(token is not None) for token in sampled], tokens)

    def _write(self, row: Row, computed: int, scheduled: int) -> None:
        assert row.num_computed in (-1, computed), "scheduler and worker disagree on what is computed"
        assert 0 < scheduled <= len(row.tokens) - computed, "tokens are scheduled that do not exist"
        row.num_computed = computed + scheduled
        for position in range(computed, computed + scheduled):
            self.slots[self._slot(row, position)] = tuple(row.tokens[: position + 1])

    def _attend(self, row: Row, computed: int, scheduled: int) -> int | None:
        for position in range(computed + scheduled):
            expected = tuple(row.tokens[: position + 1])
            assert self.slots.get(self._slot(row, position)) == expected, "stale or foreign keys and values"
        if computed + scheduled < len(row.tokens):
            return None
        token = next_token(row.tokens, row.seed)
        row.tokens.append(token)
        return token

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        size = self.capacity.block_size
        return row.table[position // size], position % size
