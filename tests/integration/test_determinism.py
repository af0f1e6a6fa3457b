"""The determinism matrix: cold or warm cache x alone or among neighbours x chunk budget x preempted or not x one or two
workers.  In every cell the same requests give the token ids of one reference cell and, on the native kernels, its
log-probabilities bit for bit.

That a cell's thing happened is read off the plans that its workers ran, not off counters: how much of a prompt was
cached, in how many pieces it was computed, who shared its steps, who was admitted twice, and where.

Torch's kernels promise the tokens (ARCHITECTURE.md, "A token is a pure function: how"): their attention is rounded from
float64, which differs between paddings about once in a hundred million elements, and then by the last bit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest

from services.scheduler.state.policy import Policy
from shared.messages import TokenLogprobs
from tests.integration.engine import MODEL, Ask, Engine, Output, ask

UNLIMITED = 4096
CHUNK_BUDGETS = {"native": (37, UNLIMITED), "torch": (16, UNLIMITED)}  # tokens per step
MODELS = {"native": MODEL, "torch": MODEL.with_name("pageant-stories-draft")}  # the small one where kernels are slow
PROMPT, WARM, BLOCK = 95, 48, 16  # tokens; WARM of each prompt are in a warm cache
NUM_TOKENS = 40
TORCH_TOLERANCE = 1e-4  # of a log-probability: the last bits of a few float32 hidden states
KINDS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"temperature": 1.2, "min_p": 0.02, "logit_bias": {5: 2.0}},
)
NUM_NEIGHBOURS = 5
NUM_BLOCKS, TIGHT_ALONE, TIGHT_TOGETHER = 256, 10, 40  # of the pool; tight ones preempt
MAX_SQUEEZE = 100  # pairs of steps within which a subject must have been preempted
SUBJECT, OTHER = 1, 0  # priorities: what takes blocks from a subject is more urgent


@dataclass(frozen=True)
class Cell:
    kernels: str
    warm: bool
    neighbours: bool
    budget: int
    preempted: bool
    workers: int

    def __str__(self) -> str:
        words = (
            self.kernels,
            "warm" if self.warm else "cold",
            "crowd" if self.neighbours else "alone",
            "whole" if self.budget == UNLIMITED else f"chunks{self.budget}",
            "preempted" if self.preempted else "undisturbed",
            f"{self.workers}w",
        )
        return "-".join(words)

    @property
    def num_blocks(self) -> int:
        if not self.preempted:
            return NUM_BLOCKS
        return TIGHT_TOGETHER // self.workers if self.neighbours else TIGHT_ALONE


CELLS = [
    Cell(kernels, warm, neighbours, budget, preempted, workers)
    for kernels, budgets in CHUNK_BUDGETS.items()
    for warm, neighbours, budget, preempted, workers in itertools.product(
        (False, True), (False, True), budgets, (False, True), (1, 2)
    )
]


@cache
def subjects() -> tuple[Ask, ...]:
    rng = random.Random(17)
    return tuple(
        ask(prompt_of(rng, PROMPT), seed=index, max_tokens=NUM_TOKENS, logprobs=3, **kind)
        for index, kind in enumerate(KINDS)
    )


@cache
def neighbours() -> tuple[Ask, ...]:
    """Noise of all lengths and kinds, some with log-probabilities, none like a subject; still there at the end."""
    rng = random.Random(18)
    return tuple(
        ask(prompt_of(rng, 3 + 9 * index), seed=90 + index, max_tokens=64, logprobs=index % 2 or None, **kind)
        for index, kind in zip(range(NUM_NEIGHBOURS), itertools.cycle(KINDS), strict=False)
    )


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(4, 4000) for _ in range(length)]


@dataclass
class Life:
    """What the plans say of one request."""

    cached: list[int] = field(default_factory=list)  # tokens that were there already, at each admission
    pieces: int = 0  # steps that computed its prompt in part or in whole, after the first admission
    workers: set[str] = field(default_factory=set)
    company: set[str] = field(default_factory=set)  # requests that had a part in the same steps


def lives(engine: Engine) -> dict[str, Life]:
    found: dict[str, Life] = {}
    holders: dict[tuple[str, int], str] = {}  # (worker, row) -> request
    for worker, plan in engine.plans:
        starts = dict(zip(plan.rows, plan.num_computed_tokens, strict=True))
        for admitted in plan.admitted:
            holders[worker, admitted.row] = admitted.request_id
            found.setdefault(admitted.request_id, Life()).cached.append(starts[admitted.row])
        present = {holders[worker, row] for row in plan.rows}
        for row, start in starts.items():
            life = found[holders[worker, row]]
            life.pieces += len(life.cached) == 1 and start < PROMPT
            life.workers.add(worker)
            life.company |= present - {holders[worker, row]}
    return found


class Play:
    """One cell: warms the cache where it is to be warm, and puts the subjects through what the cell is about."""

    def __init__(self, cell: Cell) -> None:
        policy = Policy(max_num_batched_tokens=cell.budget, scheduling_policy="priority")
        self.cell = cell
        model = str(MODELS[cell.kernels])
        self.engine = Engine(
            policy, workers=cell.workers, kernels=cell.kernels, num_blocks=cell.num_blocks, model=model
        )
        self.ids: list[str] = []  # of the subjects
        self._rng = random.Random(19)

    def run(self) -> list[Output]:
        """The subjects' outputs: alone they come one to a worker, else all at once."""
        size = len(subjects()) if self.cell.neighbours else self.cell.workers
        for start in range(0, len(subjects()), size):
            self._run_group(subjects()[start : start + size])
        assert not self.engine.rejected, self.engine.rejected
        return [output for (output,) in self.engine.outputs_of(self.ids, subjects())]

    def _run_group(self, group: Sequence[Ask]) -> None:
        engine = self.engine
        if self.cell.warm:
            engine.generate([ask(one.prompt[: WARM + 1], max_tokens=1) for one in group])
        ids = [engine.add(one, priority=SUBJECT) for one in group]
        self.ids += ids
        if self.cell.neighbours:
            if self.cell.warm:  # the crowd is more urgent and, in a tight pool, would take the warm blocks first
                self._admit()
            for one in neighbours():
                engine.add(one, priority=OTHER)
        if self.cell.preempted:
            self._squeeze(ids)
        engine.run()

    def _admit(self) -> None:
        for _ in range(MAX_SQUEEZE):
            if not self.engine.core.num_waiting:
                return
            self.engine.step()
        pytest.fail("the subjects were not admitted")

    def _squeeze(self, ids: list[str]) -> None:
        """Bring in what needs blocks more urgently, from the first token on, until a subject had to give its own up."""
        core, length = self.engine.core, 64 if self.cell.neighbours else 20
        requests = [core.requests[name] for name in ids]
        for _ in range(MAX_SQUEEZE):
            if any(request.sequences[0].num_preemptions for request in requests):
                return
            if any((name, 0) in self.engine.outputs for name in ids) and core.num_waiting <= 4 * self.cell.workers:
                for _ in range(2 * self.cell.workers):
                    self.engine.add(ask(prompt_of(self._rng, 15), max_tokens=length), priority=OTHER)
            self.engine.step()
        pytest.fail("no subject was preempted")


def prove(play: Play) -> None:
    """That the cell's things happened, each to every subject, but for preemption: to one of each group at least."""
    cell, found = play.cell, lives(play.engine)
    mine = [found[name] for name in play.ids]
    assert all(life.cached[0] == (WARM if cell.warm else 0) for life in mine)
    assert all((life.pieces == 1) == (cell.budget == UNLIMITED) for life in mine)
    assert set.union(*(life.workers for life in mine)) == set(play.engine.runners)
    if cell.neighbours:  # of two workers, one may be through with its neighbours before the last subject comes back
        assert sum(bool(life.company - set(play.ids)) for life in mine) >= len(mine) - (cell.workers - 1)
    elif not cell.preempted:
        assert not any(life.company for life in mine)
    num_groups = 1 if cell.neighbours else len(subjects()) // cell.workers
    num_preempted = sum(len(life.cached) > 1 for life in mine)
    assert num_preempted >= num_groups if cell.preempted else num_preempted == 0


@cache
def reference(kernels: str) -> list[Output]:
    return Play(Cell(kernels, warm=False, neighbours=False, budget=UNLIMITED, preempted=False, workers=1)).run()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell_equals_the_reference(cell: Cell) -> None:
    play = Play(cell)
    outputs, wanted = play.run(), reference(cell.kernels)
    prove(play)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
    if cell.kernels == "native":
        assert [output.logprobs for output in outputs] == [output.logprobs for output in wanted]
    else:
        assert_close(outputs, wanted)


def assert_close(outputs: list[Output], wanted: list[Output]) -> None:
    for found, expected in zip(positions(outputs), positions(wanted), strict=True):
        assert found.token_ids == expected.token_ids
        assert found.rank == expected.rank
        assert found.logprobs == pytest.approx(expected.logprobs, abs=TORCH_TOLERANCE)


def positions(outputs: list[Output]) -> list[TokenLogprobs]:
    return [entry for output in outputs for entry in output.logprobs if entry is not None]


@pytest.mark.parametrize("kernels", CHUNK_BUDGETS)
def test_the_reference_tells_requests_apart(kernels: str) -> None:
    """Equal outputs would prove little if every request gave the same, or no log-probability were there."""
    outputs = reference(kernels)
    assert len({tuple(output.token_ids) for output in outputs}) == len(KINDS)
    assert len(positions(outputs)) == NUM_TOKENS * len(KINDS)
    assert len({entry.logprobs[0] for entry in positions(outputs)}) > NUM_TOKENS
