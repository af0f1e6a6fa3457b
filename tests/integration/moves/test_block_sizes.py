"""Workers of different block sizes, one after the other and side by side: a sequence outlives its worker, what names
its blocks there must not.  Tokens and log-probabilities are those of a run without a cache."""

from __future__ import annotations

from functools import partial

import pytest

from services.scheduler.state.policy import Policy
from tests.integration.engine import Ask, Engine, Output, ask

Make = partial[Engine]
COMMON = [1400 + index for index in range(16)]  # one block of 16, half of one of 32


@pytest.fixture(scope="module", params=["native", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    return partial(Engine, kernels=request.param)


def asks() -> tuple[Ask, ...]:
    """Prompts that agree in 16 tokens and differ later."""
    return tuple(
        ask(COMMON + [2000 + 100 * kind + index for index in range(17)], max_tokens=12, temperature=0.0, logprobs=2)
        for kind in range(3)
    )


def alone(make: Make) -> list[Output]:
    engine = make(Policy(enable_prefix_caching=False))
    return [engine.generate([one])[0][0] for one in asks()]


def test_a_failover_to_larger_blocks_finds_nobody_elses_keys_and_values(make: Make) -> None:
    engine = make(Policy(max_num_batched_tokens=33), block_size=16)
    ids = [engine.add(one) for one in asks()]
    while not all(("r" + str(index), 0) in engine.outputs for index in range(len(ids))):
        engine.step()
    engine.lose("w0")
    engine.join("w1", block_size=32)
    engine.run()
    outputs = [one for (one,) in engine.outputs_of(ids, asks())]
    for output, wanted in zip(outputs, alone(make), strict=True):
        assert output.token_ids == wanted.token_ids
        assert output.logprobs == wanted.logprobs
    assert engine.counters.num_worker_losses == 1 and engine.counters.num_preemptions == len(ids)


def test_workers_of_two_block_sizes_take_over_from_each_other(make: Make) -> None:
    """What each cache has is found again by those that come later, whatever size they had before."""
    engine = make(Policy(max_num_batched_tokens=64), block_size=16)
    engine.join("w1", block_size=32)
    ids = [engine.add(one) for one in (*asks(), *asks())]
    for _ in range(4):
        engine.step()
    assert all(replica.running for replica in engine.core.replicas.values()), "both have work"
    engine.lose("w0")
    engine.step()
    engine.join("w2", block_size=64)
    engine.join("w3", block_size=16)
    engine.lose("w1")
    engine.run()
    hits = engine.counters.num_prefix_cache_hits
    engine.lose("w2")
    ids += [engine.add(one) for one in asks()]
    engine.run()
    outputs = [one for (one,) in engine.outputs_of(ids, 3 * asks())]
    for output, wanted in zip(outputs, 3 * alone(make), strict=True):
        assert output.token_ids == wanted.token_ids
        assert output.logprobs == wanted.logprobs
    assert engine.counters.num_prefix_cache_hits > hits
