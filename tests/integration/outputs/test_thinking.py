"""Reasoning that is held to a budget: its end is forced, and the tokens are those of the solo run whatever happens."""

from __future__ import annotations

import random
from functools import cache, partial

import msgspec
import pytest

from services.scheduler.state.policy import Policy
from shared.requests.grammar import Grammar, GrammarKind
from shared.requests.reasoning import ReasoningMeter, ReasoningTags, ThinkingBudget
from tests.integration.drafts.test_speculation import DRAFT
from tests.integration.engine import Ask, Engine, ask, token_ids
from tests.integration.outputs.test_grammars import compiled, text_of
from tests.integration.test_equivalences import Make, Tokens

TAGS = ReasoningTags([2000, 2001], [[2002]], [2002, 2003])
BUDGETS = (0, 3, 9, 1000)
CHOICE = Grammar(GrammarKind.CHOICE, '["once upon a time", "the end", "once more"]')


@pytest.fixture(scope="module", params=["native", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    return partial(Engine, kernels=request.param)


@cache
def thinking_asks() -> tuple[Ask, ...]:
    """Every budget, alone and in front of a grammar, greedy and sampled."""
    rng = random.Random(5)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 2, "repetition_penalty": 1.1},
        {"temperature": 0.9, "grammar": compiled(CHOICE), "ignore_eos": False},
    ]
    return tuple(
        ask(
            [rng.randrange(4, 1900) for _ in range(rng.choice([3, 40]))],
            seed=seed,
            thinking=ThinkingBudget(TAGS, budget, is_open=True),
            **kind,
        )
        for seed, (budget, kind) in enumerate((budget, kind) for budget in BUDGETS for kind in kinds)
    )


@cache
def solo(make: Make) -> Tokens:
    engine = make(Policy(enable_prefix_caching=False))
    return [token_ids(engine.generate([one]))[0] for one in thinking_asks()]


def test_the_end_comes_where_the_budget_is_spent_and_an_answer_keeps_to_its_grammar(make: Make) -> None:
    outputs = make(Policy()).generate(list(thinking_asks()))
    assert token_ids(outputs) == solo(make)
    num_answers = 0
    for one, request in zip(thinking_asks(), outputs, strict=True):
        budget = one.params.thinking
        assert budget is not None
        for output in request:
            meter = ReasoningMeter(TAGS, is_inside=True)
            meter.advance(output.token_ids)
            count = budget.num_tokens
            if count == 1000:
                assert meter.is_inside and meter.num_tokens == 24
                continue
            assert meter.num_tokens == count and output.token_ids[count : count + 2] == TAGS.forced
            if one.params.grammar is not None:
                answer = msgspec.structs.replace(output, token_ids=output.token_ids[count + 2 :])
                assert text_of(answer) in msgspec.json.decode(CHOICE.text, type=list[str])
                num_answers += 1
    assert num_answers == 3


def test_an_unlimited_budget_changes_no_token(make: Make) -> None:
    free = [
        msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, thinking=None))
        for one in thinking_asks()[-3:-1]
    ]
    assert token_ids(make(Policy()).generate(free)) == solo(make)[-3:-1]


def test_preempted_lost_and_resumed_equals_solo(make: Make) -> None:
    engine = make(Policy(), workers=2, num_blocks=10, max_model_len=96)
    ids = [engine.add(one) for one in thinking_asks()]
    for step in range(20):
        engine.step()
        if step == 9:
            engine.lose("w1")
    engine.run()
    assert not engine.rejected
    assert token_ids(engine.outputs_of(ids, thinking_asks())) == solo(make)
    assert engine.counters.num_preemptions and engine.counters.num_worker_losses == 1


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_drafts_do_not_carry_reasoning_beyond_its_budget(make: Make, acceptance: str) -> None:
    engine = make(Policy(num_draft_tokens=4, acceptance=acceptance), draft=DRAFT)
    engine.join_draft("draft")
    outputs = token_ids(engine.generate(list(thinking_asks())))
    if acceptance == "coupled":
        assert outputs == solo(make)
    for one, request in zip(thinking_asks(), outputs, strict=True):
        count = one.params.thinking.num_tokens if one.params.thinking else 0
        assert all(output[count : count + 2] == TAGS.forced for output in request if count < 1000)
    assert engine.counters.num_accepted_tokens > 0
