"""A scheduler that dies, and another that goes on from what the clients have: the tokens, the log-probabilities and the
ends are those of the undisturbed run, on the native kernels and on torch's.  One request of three is in the
background."""

from __future__ import annotations

import random
from functools import cache, partial

import pytest

from services.scheduler.state.policy import Policy
from shared.messages import AddRequest, RequestHeader
from shared.packing import pack_tokens
from tests.integration.engine import Ask, Engine, Output, ask

Make = partial[Engine]
Key = tuple[str, int]


@pytest.fixture(scope="module", params=["native", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    return partial(Engine, kernels=request.param)


@cache
def asks() -> tuple[Ask, ...]:
    rng = random.Random(7)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "logprobs": 1, "n": 2, "min_tokens": 4, "ignore_eos": False},
    ]
    prompts = [[rng.randrange(4, 4000) for _ in range(rng.choice([2, 15, 17, 40]))] for _ in range(18)]
    return tuple(
        ask(prompt, seed=index, max_tokens=10 + 2 * index, **kinds[index % len(kinds)])
        for index, prompt in enumerate(prompts)
    )


@cache
def undisturbed(make: Make) -> dict[Key, Output]:
    engine = make(Policy())
    engine.generate(list(asks()))
    return engine.outputs


@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_resumed_equals_undisturbed(make: Make, num_steps: int) -> None:
    """Three schedulers, each killed after a few steps with a bit of its output undelivered, then one to the end."""
    engine = make(Policy())
    journal: dict[Key, Output] = {}
    rng = random.Random(num_steps)
    for life in range(4):
        for index, one in enumerate(asks()):
            if not through(journal, index, one):
                engine.core.add(resumption(journal, index, one), now=0.0)
        steps = 0
        while engine.step() and (life == 3 or steps < num_steps):
            steps += 1
        assert not engine.rejected
        deliver(engine, journal, rng if life < 3 else None)
        if life < 3:
            engine = make(Policy())
            assert any(output.token_ids and not output.finish_reason for output in journal.values())
    wanted = undisturbed(make)
    assert journal.keys() == wanted.keys()
    for key, output in journal.items():
        assert output.token_ids == wanted[key].token_ids, key
        assert output.finish_reason == wanted[key].finish_reason, key
        assert output.logprobs == wanted[key].logprobs, key
        assert output.prompt_logprobs == wanted[key].prompt_logprobs, key


def through(journal: dict[Key, Output], index: int, one: Ask) -> bool:
    keys = [(f"r{index}", n) for n in range(one.params.n)]
    return all(key in journal and journal[key].finish_reason for key in keys)


def resumption(journal: dict[Key, Output], index: int, one: Ask) -> AddRequest:
    known = [journal.get((f"r{index}", n), Output()) for n in range(one.params.n)]
    return AddRequest(
        RequestHeader(f"r{index}", "g", is_background=index % 3 == 2), one.params, pack_tokens(one.prompt), [0],
        sent_token_ids=[b"" if output.finish_reason else pack_tokens(output.token_ids) for output in known],
        sent_finished=[output.finish_reason is not None for output in known], is_resumed=bool(journal),
    )  # fmt: skip


def deliver(engine: Engine, journal: dict[Key, Output], rng: random.Random | None) -> None:
    """As a gateway does it: what is known already is dropped.  With `rng`, the last few tokens get lost."""
    for key, said in engine.outputs.items():
        known = journal.setdefault(key, Output(prompt_logprobs=said.prompt_logprobs))
        num_known = len(known.token_ids)
        assert said.token_ids[:num_known] == known.token_ids, "an earlier output is told again as it was"
        num_lost = rng.randrange(4) if rng is not None else 0
        end = max(num_known, len(said.token_ids) - num_lost)
        known.token_ids += said.token_ids[num_known:end]
        known.logprobs += said.logprobs[num_known:end]
        if end == len(said.token_ids):
            known.finish_reason = known.finish_reason or said.finish_reason
        if not known.token_ids:
            del journal[key]
