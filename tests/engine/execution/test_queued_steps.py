"""Steps that are queued before the one before them has ended: the same tokens as one by one, whatever a plan does to
what queued steps still read."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from engine.execution import queued_steps
from engine.execution.outputs.pending_result import PendingResult
from engine.execution.runner import ModelRunner
from shared.messages.steps import StepPlan
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import make_runner, random_prompt, save_checkpoint
from tests.engine.driver import GREEDY, Driver, Live

SAMPLED = SamplingParams(temperature=0.8)
TRUNCATED = SamplingParams(temperature=1.2, top_k=30, top_p=0.9)
CUT = SamplingParams(temperature=0.9, min_p=0.05)
PENALISED = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5)
SCORED = SamplingParams(temperature=0.0, logprobs=2)
QUEUED = (GREEDY, SAMPLED, TRUNCATED, CUT)
BUNDLED = Path(__file__).resolve().parents[3] / "models" / "pageant-stories"
COUNT = 24  # tokens of each request


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("queued")
    save_checkpoint(path, "llama-tied", kernels="native")
    return path


@pytest.fixture
def runner(directory: Path) -> ModelRunner:
    return make_runner(directory, "native", dtype="float32", num_blocks=24, max_num_seqs=8)


@pytest.fixture(scope="module")
def slow() -> ModelRunner:
    """Its prompts keep the library's thread, which all models share, from what is queued behind them."""
    return make_runner(BUNDLED, "native", dtype="float32", max_num_seqs=1)


def occupy(slow: ModelRunner) -> PendingResult:
    slow.reset()
    driver = Driver(slow)
    driver.add(0, random_prompt(900, seed=1))
    return slow.launch(driver.plan({0: 900}))


def host_only(runner: ModelRunner) -> ModelRunner:
    """One that looks at the results of each step itself."""
    runner._queued._model = None
    return runner


class Ahead:
    """Requests in rows, of which one follows another; a plan is launched before the result of the one before it."""

    def __init__(self, runner: ModelRunner, num_rows: int, requests: list[tuple[int, SamplingParams]]) -> None:
        """Lengths of prompts, and parameters; seeds are their numbers."""
        self._runner = runner
        self._driver = Driver(runner)
        self._waiting = deque(enumerate(requests))
        self._num_rows = num_rows
        self._rows: dict[int, tuple[int, Live, int]] = {}  # request, its sequence, outputs that are planned
        self._launched: deque[tuple[StepPlan, list[int], PendingResult]] = deque()
        self.found: dict[int, list[int]] = {number: [] for number, _ in self._waiting}
        self.num_ahead = 0  # plans that were launched while the one before was on its way

    def play(self) -> dict[int, list[int]]:
        while self._waiting or self._rows:
            self._step()
            while len(self._launched) > 1:
                self._finish()
        while self._launched:
            self._finish()
        return self.found

    def _step(self) -> None:
        for row in range(self._num_rows):
            if row not in self._rows and self._waiting:
                number, (length, params) = self._waiting.popleft()
                live = self._driver.add(row, random_prompt(length, seed=number), params, seed=number)
                self._rows[row] = number, live, 0
        schedule = {
            row: min(17, live.num_prompt - live.num_computed) or 1 if not planned else 1
            for row, (_, live, planned) in self._rows.items()
        }
        plan = self._driver.plan(schedule)
        requests = [self._rows[row][0] for row in plan.rows]
        self.num_ahead += bool(self._launched)
        self._launched.append((plan, requests, self._runner.launch(plan)))
        for row, count in schedule.items():
            number, live, planned = self._rows[row]
            live.num_computed += count
            planned += live.num_computed >= live.num_prompt
            self._rows[row] = number, live, planned
            if planned == COUNT:
                self._driver.finish(row)
                del self._rows[row]

    def _finish(self) -> None:
        plan, requests, pending = self._launched.popleft()
        result = pending.finish()
        assert result.step_id == plan.step_id and not result.refused_rows
        tokens = iter(result.sampled_token_ids)
        for number, count in zip(requests, result.num_sampled, strict=True):
            self.found[number] += [next(tokens) for _ in range(count)]


@pytest.mark.parametrize(
    "kinds",
    [QUEUED, (GREEDY,), (*QUEUED, PENALISED, SCORED), (PENALISED, GREEDY)],
    ids=["drawn", "greedy", "all", "half"],
)
def test_the_same_tokens_as_one_by_one(
    runner: ModelRunner, directory: Path, kinds: tuple[SamplingParams, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [(5 + 7 * number % 40, kinds[number % len(kinds)]) for number in range(12)]
    alone = host_only(make_runner(directory, "native", dtype="float32", num_blocks=24, max_num_seqs=8))
    expected = Ahead(alone, 1, requests).play()
    ahead = Ahead(runner, 3, requests)
    num_queued, queue = 0, runner._model.queue  # type: ignore[attr-defined]

    def counted(*given: object) -> object:
        nonlocal num_queued
        num_queued += 1
        return queue(*given)

    monkeypatch.setattr(runner._model, "queue", counted)
    assert ahead.play() == expected
    assert all(len(tokens) == COUNT for tokens in expected.values())
    assert ahead.num_ahead > 50 and num_queued > (50 if PENALISED not in kinds else 0)
    assert runner.queues and not alone.queues


def test_a_launch_does_not_wait_for_the_step_before(runner: ModelRunner, slow: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(0, random_prompt(9, seed=3))
    driver.step({0: 9})
    driver.step({0: 1})
    shares = []  # of the time until the results are there
    for _ in range(5):  # another process may take this thread's core for as long
        occupied, begin = occupy(slow), time.perf_counter()
        pending = [runner.launch(_next_plan(driver)) for _ in range(2)]
        launching = time.perf_counter() - begin
        assert [len(one.finish().sampled_token_ids) for one in pending] == [1, 1]
        shares.append(launching / (time.perf_counter() - begin))
        occupied.finish()
    assert min(shares) < 0.3, shares


def _next_plan(driver: Driver) -> StepPlan:
    plan = driver.plan({0: 1})
    driver.live[0].num_computed += 1
    return plan


def test_a_row_is_not_given_away_while_a_step_reads_it(runner: ModelRunner, slow: ModelRunner, directory: Path) -> None:
    prompt, other = random_prompt(30, seed=3), random_prompt(30, seed=4)
    alone = Driver(host_only(make_runner(directory, "native", dtype="float32", num_blocks=24, max_num_seqs=8)))
    alone.add(0, prompt)
    expected = alone.step({0: 30}).sampled_token_ids
    driver = Driver(runner)
    driver.add(0, prompt)
    occupied = occupy(slow)
    first = runner.launch(driver.plan({0: 30}))
    driver.finish(0)
    driver.add(0, other)
    second = runner.launch(driver.plan({0: 30}))
    assert first.finish().sampled_token_ids == expected
    alone.finish(0)
    alone.add(0, other)
    assert second.finish().sampled_token_ids == alone.step({0: 30}).sampled_token_ids
    occupied.finish()


def test_a_block_is_copied_behind_the_step_that_fills_it(runner: ModelRunner, slow: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(0, random_prompt(16, seed=3))
    occupied = occupy(slow)
    first = runner.launch(driver.plan({0: 16}))
    driver.live[0].num_computed = 16
    (source,), copy = driver.live[0].blocks, driver.free.pop()
    second = runner.launch(driver.plan({0: 1}, copies=[(source, copy)]))
    first.finish(), second.finish(), occupied.finish()
    assert all(torch.equal(one[source], one[copy]) and one[source].any() for one in runner._pool.tensors)


def test_a_new_epoch_waits_for_the_steps_of_the_last_one(runner: ModelRunner, slow: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(0, random_prompt(9, seed=3))
    occupied = occupy(slow)
    pending = runner.launch(driver.plan({0: 9}))
    runner.reset()
    length = len(driver.live[0].token_ids)
    assert runner._table.tokens[0, length].item() == pending.finish().sampled_token_ids[0]
    occupied.finish()


def test_a_step_that_is_given_up_is_computed_first(directory: Path, slow: ModelRunner) -> None:
    """What it writes to must not be freed before."""
    runner = make_runner(directory, "native", dtype="float32", num_blocks=24)
    driver = Driver(runner)
    driver.add(0, random_prompt(9, seed=3))
    occupied = occupy(slow)
    pending = runner.launch(driver.plan({0: 9}))
    tokens = runner._table.tokens
    before = tokens[0, 9].item()
    del pending, runner, driver
    assert before == 0 != tokens[0, 9].item()
    occupied.finish()


def test_a_step_is_short_where_the_last_of_its_size_was(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(runner)
    driver.add(0, random_prompt(60, seed=3))
    for count, seconds in ((9, 0.001), (20, 1.0)):
        clock = iter((0.0, seconds))
        monkeypatch.setattr(queued_steps, "time", SimpleNamespace(perf_counter=lambda clock=clock: next(clock)))
        plan = driver.plan({0: count})
        assert runner.finish(runner.begin(plan)).device_time == seconds
        driver.live[0].num_computed += count
    short = {count: runner._queued.is_short(driver.plan({0: count})) for count in (2, 8, 15, 16, 31)}
    assert short == {2: False, 8: True, 15: True, 16: False, 31: False}


def test_refused_rows_are_told_with_the_others(runner: ModelRunner) -> None:
    driver = Driver(runner)
    for row in range(2):
        driver.add(row, random_prompt(9, seed=row))
    driver.step({0: 9, 1: 9})
    plan = driver.plan({0: 1, 1: 1})
    result = runner.launch(msgspec.structs.replace(plan, num_computed_tokens=[9, 7])).finish()
    assert [one.entry for one in result.refused_rows] == [1] and result.num_sampled == [1, 0]


def test_the_queue_is_empty_once_its_last_step_is_over(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(0, random_prompt(9, seed=0))
    driver.step({0: 9})
    first = runner.launch(_next_plan(driver))
    second = runner.launch(_next_plan(driver))
    first.finish()
    assert not runner._queued.is_empty
    second.finish()
    assert runner._queued.is_empty
