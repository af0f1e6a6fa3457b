"""Drafts of a worker's own head change no token, whatever happens to a request, and are accepted as often after it.

The bundled model's head drafts well; those of random models with MTP layers draft what is hardly ever accepted, and one
of these models keeps states, which go back with each refused draft."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest

from services.scheduler.state.policy import Policy
from tests.engine.heads.mtp import write_mtp
from tests.integration.engine import MODEL, ROOT, Ask, Engine, ask, token_ids
from tests.integration.test_equivalences import Make, Tokens, asks

HEAD = ROOT / "models" / "pageant-stories-eagle"


@pytest.fixture(scope="module", params=["native", "torch", "native deepseek-v3", "native qwen3.5"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Make, Make]:
    """Engines without and with a head."""
    kernels, *kind = request.param.split()
    if not kind:
        return partial(Engine, kernels=kernels), partial(Engine, kernels=kernels, draft=f"eagle:{HEAD}")
    directory = tmp_path_factory.mktemp(kind[0])
    write_mtp(directory, kind[0], kernels, vocab_size=4096, max_position_embeddings=512)
    plain = partial(Engine, kernels=kernels, model=str(directory))
    return plain, partial(plain, draft="mtp")


@cache
def plain_tokens(plain: Make) -> Tokens:
    return token_ids(plain(Policy(max_num_batched_tokens=4096)).generate(list(asks())))


def is_trained(make: Make) -> bool:
    return "model" not in make.keywords


def test_drafts_of_a_head_change_no_token(pair: tuple[Make, Make]) -> None:
    """In chunks, and once more behind cached prefixes, to the token."""
    plain, drafting = pair
    engine = drafting(Policy(num_draft_tokens=3, max_num_batched_tokens=96, enable_partial_block_hits=True))
    for _ in range(2):
        assert token_ids(engine.generate(list(asks()))) == plain_tokens(plain)
    counters = engine.counters
    assert counters.num_prefix_cache_hits > 500
    assert counters.num_chunked_prefills > 10
    assert counters.num_draft_tokens > 1000
    assert not is_trained(drafting) or counters.num_accepted_tokens > 100


def test_the_disturbed_draft_on(pair: tuple[Make, Make]) -> None:
    """Two workers with few blocks, of which one is lost and another comes."""
    plain, drafting = pair
    engine = drafting(Policy(num_draft_tokens=3, max_num_batched_tokens=128), workers=2, num_blocks=24)
    ids = [engine.add(one) for one in asks()]
    for _ in range(8):
        engine.step()
    assert engine.core.replicas["w0"].running
    engine.lose("w0")
    engine.step()
    engine.join("w2")
    engine.run()
    assert token_ids(engine.outputs_of(ids, asks())) == plain_tokens(plain)
    assert engine.counters.num_preemptions > 0 and engine.counters.num_worker_losses == 1


@pytest.fixture(scope="module")
def stories() -> list[Ask]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(MODEL) / "tokenizer.json"))
    names = ("dog", "cat", "bird", "bear", "boat", "frog", "ball", "king")
    asked = "<|user|>Tell me a story about a {} and a little girl who went to the park.<|end|><|assistant|>"
    texts = [asked.format(name) for name in names]
    return [ask(tokenizer.encode(text).ids, temperature=0.0, max_tokens=60) for text in texts]


def test_the_bundled_head_is_worth_its_name(stories: list[Ask]) -> None:
    """Tokens of a step, from an empty cache; behind a prefix that others computed, nearly as many."""
    engine = Engine(Policy(num_draft_tokens=4, max_num_batched_tokens=4096), kernels="native", draft=f"eagle:{HEAD}")
    counters, num_tokens, found = engine.counters, len(stories) * 60, []
    for _ in range(2):
        num_accepted, num_hits = counters.num_accepted_tokens, counters.num_prefix_cache_hits
        engine.generate(stories)
        found.append(num_tokens / (num_tokens - counters.num_accepted_tokens + num_accepted))
    assert counters.num_prefix_cache_hits > num_hits
    assert found[0] > 2.5
    assert found[1] > 0.98 * found[0]


def test_the_number_of_drafts_is_chosen_by_measurement(stories: list[Ask]) -> None:
    longer = [ask(one.prompt, temperature=0.0, max_tokens=200) for one in stories[:2]]
    engine = Engine(kernels="native", draft=f"eagle:{HEAD}")
    assert token_ids(engine.generate(longer)) == token_ids(Engine(kernels="native").generate(longer))
    asked = [max(plan.num_wanted_drafts, default=0) for _, plan in engine.plans]
    assert max(asked) <= 8 and set(asked) >= {0, 4}, "none at first; then some lengths were tried"
    assert sum(length in (0, 1, 2, 4, 8) for length in asked) >= len(asked) - len(longer), "others where little is left"
    assert engine.counters.num_accepted_tokens > 50
