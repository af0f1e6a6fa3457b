"""Two hundred concurrent requests of every kind in a pool that is far too small: each gets its solo output."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.system.harness import ROOT, ask, troupe

NUM_REQUESTS = 200
OPENINGS = ["Once upon a time", "One day, a little dog", "Lily and Tom saw a big", "The end of the"]


def requests() -> list[Any]:
    rng = random.Random(3)
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. "
    made = []
    for index in range(NUM_REQUESTS):
        text = rng.choice(OPENINGS)
        if index % 4 == 0:
            text = story * rng.randrange(1, 7) + text
        kind: dict[str, Any] = rng.choice([
            {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 20, "n": 2},
            {"temperature": 1.2, "min_p": 0.1}, {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
            {"temperature": 0.0, "logprobs": 2}, {"stop": ["Lily", "dog."]}, {"logit_bias": {10: 2.0}, "min_tokens": 5},
        ])  # fmt: skip
        length = rng.choice([5, 15, 30])
        if index % 5 == 1:  # together these outgrow the pool, whatever the model says
            kind, length = {"temperature": 1.0, "ignore_eos": True}, 64
        if index % 25 == 2:  # longer than a step's budget, and like no other
            text = f"Story {index}. " * 30
        made.append(ask(text, seed=index, max_tokens=length, **kind))
    return made


@pytest.mark.timeout(900)
def test_two_hundred_requests_equal_their_solo_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    asked = requests()
    solo = ["--max-num-seqs", "1", "--no-enable-prefix-caching", "--num-threads", "1"]
    with troupe(tmp_path_factory.mktemp("solo"), *solo) as alone:
        wanted = alone.generate(asked, timeout=500)
    options = [
        "--num-blocks",
        "20",
        "--max-model-len",
        "320",
        "--max-num-seqs",
        "64",
        "--max-num-batched-tokens",
        "128",
        "--num-threads",
        "1",
    ]
    with troupe(tmp_path_factory.mktemp("crowd"), *options) as crowd:
        answers = crowd.generate(asked, timeout=500)
        load = crowd.settled_load()
    differing = [index for index, pair in enumerate(zip(answers, wanted, strict=True)) if not same(*pair)]
    assert not differing
    assert load.num_finished == NUM_REQUESTS
    assert load.num_preemptions > 0
    assert load.num_prefix_cache_hits > 0
    assert load.num_chunked_prefills > 0
    (worker,) = load.workers
    assert worker.num_free_blocks + worker.num_cached_blocks == worker.num_blocks == 20
    print(f"preemptions {load.num_preemptions}, hits {load.num_prefix_cache_hits}, chunked {load.num_chunked_prefills}")


def same(crowd: list[Any], alone: list[Any]) -> bool:
    """Equal in all but what depends on the cache and on how often the client was sent something."""
    keys = ("text", "token_ids", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens")
    return all(getattr(a, key) == getattr(b, key) for a, b in zip(crowd, alone, strict=True) for key in keys)


def test_the_model_is_bundled() -> None:
    assert (ROOT / "models" / "pageant-stories" / "model.safetensors").stat().st_size < 25 << 20
