"""Beam search on the bundled model: the sequences are transformers', whatever else runs, with however few blocks."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from services.scheduler.state.policy import Policy
from shared.requests.beam import Beam, EarlyStopping
from tests.integration.engine import MODEL, Ask, Engine, ask, token_ids

STOPPING: dict[EarlyStopping, bool | str] = {
    EarlyStopping.LIKELY: False,
    EarlyStopping.FIRST: True,
    EarlyStopping.NEVER: "never",
}


@cache
def oracle() -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def engine(policy: Policy | None = None, **settings: Any) -> Engine:
    """In float32 throughout, as the oracle."""
    return Engine(policy, kv_cache_dtype="float32", **settings)


def transformers_beams(one: Ask, eos: list[int] | None) -> list[list[int]]:
    """The sequences that transformers finds, without the padding behind the shorter ones."""
    beam = one.params.beam
    assert beam is not None
    prompt = torch.tensor([one.prompt])
    found = oracle().generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=one.params.max_tokens,
        num_beams=beam.width,
        num_return_sequences=one.params.n,
        length_penalty=beam.length_penalty,
        early_stopping=STOPPING[beam.early_stopping],
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=-1,
    )
    return [[token for token in row[len(one.prompt) :].tolist() if token != -1] for row in found]


def search(seed: int, beam: Beam, **params: Any) -> Ask:
    rng = random.Random(seed)
    prompt = [rng.randrange(4, 4000) for _ in range(rng.choice([3, 17, 40]))]
    return ask(prompt, beam=beam, temperature=None, **{"max_tokens": 20, **params})


@pytest.mark.parametrize("stopping", list(EarlyStopping))
@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.8])
def test_the_sequences_are_those_of_transformers(penalty: float, stopping: EarlyStopping) -> None:
    asks = [search(seed, Beam(width, penalty, stopping), n=min(width, 3)) for seed, width in enumerate((1, 2, 4, 7))]
    assert token_ids(engine().generate(asks)) == [transformers_beams(one, None) for one in asks]


@pytest.mark.parametrize("stopping", list(EarlyStopping))
def test_what_ends_early_is_that_of_transformers(stopping: EarlyStopping) -> None:
    """Frequent tokens stand for the end, so that beams of many lengths compete."""
    plain = engine().generate([search(seed, Beam(4), n=4) for seed in range(4)])
    often = [output.token_ids[place] for request in plain for output in request[:2] for place in (4, 9)]
    ends = sorted(set(often))[:6]
    asks = [search(seed, Beam(4, 1.0, stopping), n=4, stop_token_ids=ends, max_tokens=24) for seed in range(4)]
    found = token_ids(engine().generate(asks))
    assert found == [transformers_beams(one, ends) for one in asks]
    assert len({len(output) for request in found for output in request}) > 3


def test_company_chunks_and_preemption_change_nothing() -> None:
    asks = [search(seed, Beam(3 + seed, 1.0), n=3, max_tokens=12 + seed) for seed in range(4)]
    asks += [ask([7] * 20, max_tokens=30), ask([9, 8], max_tokens=30, n=2)]
    alone = [token_ids(engine().generate([one]))[0] for one in asks]
    together = engine(Policy(max_num_batched_tokens=24), num_blocks=18, max_num_seqs=5, max_model_len=96)
    assert token_ids(together.generate(asks)) == alone
    assert together.counters.num_preemptions
    assert together.counters.num_block_copies


def test_log_probabilities_come_with_the_sequences() -> None:
    one = search(5, Beam(4), n=2, logprobs=2)
    for output in engine().generate([one])[0]:
        history = torch.tensor([[*one.prompt, *output.token_ids]])
        with torch.inference_mode():
            wanted = oracle()(history).logits[0, len(one.prompt) - 1 : -1].double().log_softmax(1)
        for place, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            assert entry is not None
            assert (entry.token_ids[0], len(entry.token_ids)) == (token, 3)
            torch.testing.assert_close(
                torch.tensor(entry.logprobs, dtype=torch.float64), wanted[place][entry.token_ids], atol=1e-4, rtol=0
            )
