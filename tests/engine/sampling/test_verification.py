"""Drafts change nothing: the same tokens and log-probabilities as without them, whatever is proposed."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.execution.runner import ModelRunner
from engine.sampling.proposals import certain
from kernels.ops.sampling.bad_words import forbid_words
from shared.errors import FatalError
from shared.messages.steps import DraftDistribution, Refusal
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import KERNELS, VOCAB, make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver, Live

NUM_TOKENS = 30
MOST_DRAFTS = 8
BEHIND = "behind"  # as on a GPU: what was accepted is settled there, and the host's table only before the next plan
FORMATS: dict[str, dict[str, str]] = {
    "llama-tied": {},
    "mistral-window": {"kv_cache_dtype": "int8"},
    "qwen3": {"dtype": "bfloat16"},
}
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy-logprobs": {"temperature": 0.0, "logprobs": 3},
    "greedy-penalised": {"temperature": 0.0, **PENALISED},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.001, "logprobs": 2},
    "penalised": {"temperature": 0.7, **PENALISED, "logprobs": 0},
    "constrained": {
        "temperature": 0.9,
        "bad_words_token_ids": [[7], [9, 12], [14, 15, 16]],
        "min_tokens": 12,
        "stop_token_ids": [5, 6],
        "logit_bias": {9: 3.0, 12: 4.0, 5: 2.0, 14: 2.0},
        "allowed_token_ids": list(range(3, 60)),
        "prompt_logprobs": 1,
        "logprobs": -1,
    },
}


def params_of(feature: str) -> SamplingParams:
    return SamplingParams(**FEATURES[feature])


WAYS = [*itertools.product(KERNELS, FORMATS), (BEHIND, "llama-tied")]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    kernels, variant = request.param
    directory: Path = tmp_path_factory.mktemp(variant)
    settings = {"block_size": 16, "num_blocks": 320, "num_threads": 1, **FORMATS[variant]}
    save_checkpoint(directory, variant, "torch" if kernels == BEHIND else kernels)
    if kernels != BEHIND:
        return make_runner(directory, kernels, **settings)
    made = make_runner(directory, "torch", **settings)
    sampler = made._sampler
    sampler.kernels = replace(sampler.kernels, forbid_words=forbid_words)
    return made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("llama-tied")
    save_checkpoint(directory, "llama-tied")
    return make_runner(directory)


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"runner", "small"} & set(request.fixturenames):
        request.getfixturevalue(name).reset()


def run_plainly(runner: ModelRunner, feature: str, *, prompt: int = 21, seed: int = 5) -> Live:
    """More tokens than the runs with drafts take, so that there is always something right to propose."""
    driver = Driver(runner)
    sequence = driver.add(0, random_prompt(prompt, seed=seed), params_of(feature), seed=seed, eos_token_ids=[2])
    driver.generate(NUM_TOKENS + MOST_DRAFTS + 1)
    runner.reset()
    return sequence


def add_again(driver: Driver, row: int, wanted: Live) -> Live:
    return driver.add(
        row, wanted.token_ids[: wanted.num_prompt], wanted.params, seed=wanted.seed, eos_token_ids=wanted.eos_token_ids
    )


def propose(sequence: Live, wanted: Live, wrong: set[int], count: int) -> list[int]:
    """The tokens that will follow, but others at the places in `wrong`."""
    start = len(sequence.token_ids)
    following = wanted.token_ids[start : start + count]
    return [(token + 1) % VOCAB if place in wrong else token for place, token in enumerate(following)]


def assert_same(found: Live, wanted: Live) -> None:
    count = len(found.token_ids)
    assert len(found.output) >= NUM_TOKENS
    assert found.token_ids == wanted.token_ids[:count]
    assert found.logprobs == wanted.logprobs[: len(found.output)]
    assert found.prompt_logprobs == wanted.prompt_logprobs


def assert_state(driver: Driver) -> None:
    """The worker's rows hold what the driver, who does a scheduler's arithmetic, believes."""
    table = driver.runner._table
    driver.runner._deferred.settle(list(driver.live))
    for row, sequence in driver.live.items():
        if sequence.admitted:
            assert table.tokens[row, : table.num_tokens[row]].tolist() == sequence.token_ids
            assert int(table.num_computed[row]) == sequence.num_computed


@pytest.mark.parametrize("feature", FEATURES)
def test_one_wrong_at_each_place(runner: ModelRunner, feature: str) -> None:
    """Of 4 and of 8 drafts the one at each place is wrong in turn; what stands behind it is right, and void."""
    wanted = run_plainly(runner, feature)
    driver = Driver(runner, order=1)
    sequence = add_again(driver, 3, wanted)
    driver.step({3: wanted.num_prompt})
    for count, wrong in itertools.cycle([(4, 0), (4, 2), (4, 3), (4, 4), (8, 8), (8, 5), (1, 0), (1, 1), (0, 0)]):
        if len(sequence.output) >= NUM_TOKENS:
            break
        drafts = propose(sequence, wanted, {wrong}, count)
        result = driver.step({3: 1 + count}, {3: drafts})
        assert result.num_sampled == [min(wrong, count) + 1]
        assert_state(driver)
    assert_same(sequence, wanted)


def test_many_rows_of_every_kind(runner: ModelRunner) -> None:
    """Drafts of any length and worth beside rows without, chunks of prompts, preemptions and every parameter."""
    wanted = [run_plainly(runner, feature, prompt=9 + 8 * row, seed=row) for row, feature in enumerate(FEATURES)]
    generator = random.Random(3)
    driver = Driver(runner, order=2)
    live = [add_again(driver, 2 * row, one) for row, one in enumerate(wanted)]
    num_accepted, num_chunks, num_preempted = 0, 0, 0
    while any(len(one.output) < NUM_TOKENS for one in live):
        schedule, drafts = {}, {}
        for row, (one, plain) in enumerate(zip(live, wanted, strict=True)):
            if len(one.output) >= NUM_TOKENS or generator.random() < 0.2:
                continue
            if one.output and not one.prompt_logprobs and generator.random() < 0.05:
                driver.preempt(2 * row)
                num_preempted += 1
            pending = len(one.token_ids) - one.num_computed
            chunk = generator.randint(1, pending)
            count = generator.randint(0, MOST_DRAFTS) if chunk == pending else 0
            drafts[2 * row] = propose(one, plain, set(generator.choices(range(12), k=2)), count)
            schedule[2 * row] = chunk + count
            num_chunks += chunk < pending
        result = driver.step(schedule, drafts)
        num_accepted += sum(max(0, count - 1) for count in result.num_sampled)
        assert_state(driver)
    for one, plain in zip(live, wanted, strict=True):
        assert_same(one, plain)
    assert num_accepted > 50 and num_chunks > 3 and num_preempted > 0


def test_the_prompt_s_last_chunk_brings_drafts(runner: ModelRunner) -> None:
    """Prompt, drafts and log-probabilities of both in one step."""
    wanted = run_plainly(runner, "constrained")
    driver = Driver(runner)
    sequence = add_again(driver, 0, wanted)
    driver.step({0: 6})
    result = driver.step({0: wanted.num_prompt - 6 + 5}, {0: propose(sequence, wanted, {3}, 5)})
    assert result.num_sampled == [4]
    driver.generate(NUM_TOKENS)
    assert_same(sequence, wanted)


def test_rejection_leaves_right_state(runner: ModelRunner) -> None:
    """Its tokens are others, but each has the log-probability that it has behind the same history."""
    generator = random.Random(1)
    driver = Driver(runner)
    driver.free = [block for block in driver.free if block < 300]
    sequence = driver.add(0, random_prompt(20, seed=1), SamplingParams(temperature=0.4, logprobs=0), seed=4)
    driver.step({0: 20})
    accepted = set()
    while len(sequence.output) < 3 * NUM_TOKENS:
        count = generator.randint(0, 4)
        drafts, spread = guess(runner, sequence, count)
        result = driver.step({0: 1 + count}, {0: drafts}, rejection=True, draft_distributions=spread)
        accepted.add((count, result.num_sampled[0] - 1))
        assert_state(driver)
    assert any(0 < taken < count for count, taken in accepted), "a run was cut in the middle"
    assert any(0 < taken == count for count, taken in accepted), "a run was accepted whole"
    runner.reset()
    again = Driver(runner)
    scored = again.add(0, sequence.token_ids, SamplingParams(temperature=0.0, prompt_logprobs=0))
    again.step({0: len(sequence.token_ids)})
    assert scored.prompt_logprobs[19:] == sequence.logprobs


def guess(runner: ModelRunner, sequence: Live, count: int) -> tuple[list[int], list[DraftDistribution]]:
    """Draft tokens that a copy of the sequence takes at a lower temperature, as if each had been certain."""
    copy = Driver(runner)
    copy.free = list(range(300, 320))
    one = copy.add(50, sequence.token_ids, SamplingParams(temperature=0.3), seed=len(sequence.token_ids))
    copy.generate(count)
    return one.output, [certain(token) for token in one.output]


def test_greedy_is_the_same_by_rejection(small: ModelRunner) -> None:
    for feature in ("greedy", "greedy-penalised", "greedy-logprobs"):
        wanted = run_plainly(small, feature)
        driver = Driver(small)
        sequence = add_again(driver, 0, wanted)
        driver.step({0: wanted.num_prompt})
        for wrong in itertools.cycle(range(5)):
            if len(sequence.output) >= NUM_TOKENS:
                break
            drafts = propose(sequence, wanted, {wrong}, 4)
            result = driver.step({0: 5}, {0: drafts}, rejection=True)
            assert result.num_sampled == [wrong + 1]
        assert_same(sequence, wanted)
        small.reset()


def test_plain_rows_never_make_logits(small: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    honest = small._model.greedy

    def greedy(hidden: Tensor, *more: Any) -> Tensor:
        seen.append(len(hidden))
        return honest(hidden, *more)

    monkeypatch.setattr(small._model, "greedy", greedy)
    driver = Driver(small)
    for row in range(3):
        driver.add(row, random_prompt(10, seed=row))
    driver.step({0: 10, 1: 10, 2: 4})
    driver.step({0: 4, 1: 1, 2: 3}, {0: [5, 6, 7]})
    assert seen == [2, 5]


def test_logprobs_only_of_what_comes_out(small: ModelRunner) -> None:
    wanted = run_plainly(small, "greedy-logprobs")
    driver = Driver(small)
    sequence = add_again(driver, 0, wanted)
    driver.add(1, random_prompt(10, seed=2))
    driver.step({0: wanted.num_prompt, 1: 10})
    result = driver.step({0: 4, 1: 3}, {0: propose(sequence, wanted, {1}, 3), 1: [5, 6]})
    assert result.num_sampled[0] == 2
    assert len(result.logprobs) == sum(result.num_sampled) == len(result.sampled_token_ids)
    assert [one is not None for one in result.logprobs] == [True, True] + [False] * result.num_sampled[1]


def test_up_to_the_last_position(small: ModelRunner) -> None:
    longest = small.capacity.max_model_len
    driver = Driver(small)
    sequence = driver.add(0, random_prompt(longest - 4, seed=1))
    driver.step({0: longest - 4})
    result = driver.step({0: 4}, {0: [5, 6, 7]})
    assert len(sequence.token_ids) == longest - 3 + result.num_sampled[0]
    driver = Driver(small)
    driver.add(1, random_prompt(longest - 4, seed=1))
    driver.step({1: longest - 4})
    with pytest.raises(FatalError, match="row 1 is given 17 blocks, more than 16"):
        driver.step({1: 5}, {1: [5, 6, 7, 8]})


def three(*token_ids: int, probs: tuple[float, ...] = (0.5, 0.25, 0.25)) -> DraftDistribution:
    return DraftDistribution(token_ids=pack_tokens(token_ids), probs=struct.pack(f"<{len(probs)}f", *probs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_draft_tokens": [2, 0]}, r"draft counts \[2, 0\] for 1 rows"),
        ({"num_draft_tokens": [-1]}, r"draft counts \[-1\] for 1 rows"),
        ({"num_draft_tokens": []}, "2 draft tokens for counts that sum to 0"),
        ({"num_draft_tokens": [1]}, "2 draft tokens for counts that sum to 1"),
        ({"draft_token_ids": [5, VOCAB]}, f"draft token outside the vocabulary of {VOCAB}"),
        ({"draft_token_ids": [-1, 5]}, f"draft token outside the vocabulary of {VOCAB}"),
        ({"draft_distributions": [certain(5)]}, "1 distributions.* for 2 draft tokens"),
        ({"draft_distributions": [certain(5), DraftDistribution(b"", b"")]}, "2 distributions.* for 2 draft tokens"),
        ({"draft_distributions": [certain(5), three(6, 7)]}, "must have one probability for each"),
        ({"draft_distributions": [certain(5), three(6, 7, VOCAB)]}, f"outside the vocabulary of {VOCAB}"),
        ({"draft_distributions": [certain(5), three(6, 7, 8, probs=(0.5, 0.5, 0.5))]}, "do not sum to one"),
        ({"draft_distributions": [certain(5), three(6, 7, 8, probs=(1.5, -0.5, 0))]}, "do not sum to one"),
        ({"draft_distributions": [certain(5), three(6, 7, 8, probs=(float("nan"), 0, 0))]}, "do not sum to one"),
        ({"draft_distributions": [certain(5), certain(7)]}, "no probability in its own distribution"),
    ],
)
def test_a_plan_that_contradicts_itself(small: ModelRunner, change: Mapping[str, Any], message: str) -> None:
    driver = Driver(small)
    driver.add(0, random_prompt(10, seed=1), SamplingParams(temperature=1.0))
    driver.step({0: 10})
    with pytest.raises(FatalError, match=message):
        driver.step({0: 3}, {0: [5, 6]}, **{"rejection": True, **change})


@pytest.mark.parametrize(
    "change", [{"num_scheduled_tokens": [2]}, {"num_scheduled_tokens": [4]}, {"num_computed_tokens": [9]}]
)
def test_drafts_of_a_row_out_of_step_are_refused_with_it(small: ModelRunner, change: Mapping[str, Any]) -> None:
    driver = Driver(small)
    driver.add(0, random_prompt(10, seed=1), SamplingParams(temperature=1.0))
    driver.step({0: 10})
    result = driver.step({0: 3}, {0: [5, 6]}, **{"rejection": True, **change})
    assert [(one.entry, one.reason) for one in result.refused_rows] == [(0, Refusal.NOT_IN_STEP)]
    assert result.num_sampled == [0] and not result.sampled_token_ids


def test_drafts_without_the_token_before_them(small: ModelRunner) -> None:
    """A row all of whose tokens are computed has no position that would verify the first draft."""
    driver = Driver(small)
    first = driver.add(0, random_prompt(16, seed=1))
    driver.generate(1)
    second = driver.add(1, first.token_ids[:16])
    second.blocks, second.num_computed = first.blocks[:2], 16
    result = driver.step({1: 2}, {1: [5, 6]})
    assert [(one.entry, one.reason) for one in result.refused_rows] == [(0, Refusal.NOT_IN_STEP)]
    assert result.num_sampled == [0]
