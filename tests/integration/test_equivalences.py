"""A token is a pure function of weights, history, parameters, seed and position: whatever happens to a request, its
tokens are those of its solo run.  Every test also checks that the thing it is about did happen, and runs on the native
kernels and on torch's, and on the native ones for a model of each kind that `engine.description` describes.

With PAGEANT_TEST_GROUPS=1 workers are groups of processes too, for every kind of model that these compute: two ranks,
two stages, two stages of two ranks; without it the last alone, for one kind.  They are compared with one process.

Where layers see a window they have blocks of their own, which a sequence gives up as it goes on; the solo run has none
of that, as its layers share their blocks."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.common.adapters import write_adapter
from services.scheduler.state.policy import Policy
from tests.engine.checkpoints import save_checkpoint
from tests.engine.ranks import ranked, ranked_stages, staged
from tests.engine.weights.quantised.encoders import gptq, quantise
from tests.integration.engine import MODEL, Ask, Engine, ask, token_ids
from tests.integration.ranks.grouped import Grouped, GroupedEngine

Tokens = list[list[list[int]]]


Make = partial[Engine] | partial[GroupedEngine]


# Plain, windows and caps, two ropes, heads of two sizes, experts, sinks, latents, states.
STATES = "qwen3.5"  # linear attention in three of four layers
KINDS = ("gpt2", "gemma2", "gemma3", "gemma4", "qwen2-moe", "gpt-oss", "deepseek-v3", STATES)
WINDOWS = ("gemma2", "gemma3", "gemma4", "gpt-oss")  # of 11 and 12 tokens: these layers have blocks of their own
TORCH_KINDS = tuple(f"torch {kind}" for kind in ("gpt-oss", STATES))  # what the native kernels do otherwise
# Weights in 4 bits: made at load, and of a checkpoint that has them, whose codes stay.
NARROW: dict[str, dict[str, Any]] = {"int4": {"quantization": "int4"}, "gptq": {"dtype": "auto"}}
ADAPTED = ("adapters native", "adapters int8 native")  # two of them, and none, by prompts
LAYERS = {"gemma3": {"num_hidden_layers": 3, "sliding_window_pattern": 3, "layer_types": None}}  # two of three slide
VOCAB = 4096
SMALL = MODEL.with_name("pageant-stories-draft")  # where kernels are slow
GROUPS: dict[str, Grouped] = {"ranks": ranked, "stages": staged, "stages of ranks": ranked_stages}
CUT = {"num_key_value_heads": 2, "num_global_key_value_heads": 2, "moe_intermediate_size": 64}  # a part for each of two
GROUPED = [
    f"{group} {kind}"
    for group in GROUPS
    for kind in ("native", *NARROW, *KINDS)
    if kind != STATES and (kind != "deepseek-v3" or group == "stages")
]
if os.environ.get("PAGEANT_TEST_GROUPS") != "1":  # test_ranks.py and test_stages.py have some of the rest
    GROUPED = ["stages of ranks gpt-oss"]  # with experts, windows and sinks


@pytest.fixture(scope="module", params=["native", "torch", *NARROW, *KINDS, *TORCH_KINDS, *ADAPTED, *GROUPED])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Engines that compute with these kernels, or a small random model of this kind with the native ones."""
    group, _, kind = request.param.rpartition(" ")
    if group in GROUPS:
        alone = make_alone(kind, tmp_path_factory, CUT if kind != "deepseek-v3" else {})
        return partial(GroupedEngine, grouped=GROUPS[group], **alone.keywords)
    return make_alone(request.param, tmp_path_factory, {})


@pytest.fixture(autouse=True)
def groups_end() -> Iterator[None]:
    yield
    GroupedEngine.close_all()


def make_alone(name: str, tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, Any]) -> Make:
    """`sizes`: what a small model has otherwise."""
    *torch, kind = name.split()
    if torch and torch[0] == "adapters":
        pair = (write_adapter(MODEL, tmp_path_factory.mktemp(name), seed=len(name)) for name in ("a", "bb"))
        quantization = "int8" if "int8" in torch else "none"
        return partial(Engine, kernels=kind, adapters=tuple(pair), quantization=quantization)
    if kind == "gptq":
        directory = tmp_path_factory.mktemp(kind)
        scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
        sizes = {"vocab_size": VOCAB, "max_position_embeddings": 512}
        quantise(directory, scheme, lambda module, weight: gptq(weight, symmetric=True), further=sizes)
        return partial(Engine, kernels="native", model=str(directory), **NARROW[kind])
    if kind in NARROW:
        return partial(Engine, kernels="native", **NARROW[kind])
    if kind not in KINDS:
        return partial(Engine, kernels=kind) if kind == "native" else partial(Engine, kernels=kind, model=str(SMALL))
    directory = tmp_path_factory.mktemp(kind)
    changes = {"vocab_size": VOCAB, "max_position_embeddings": 512, **LAYERS.get(kind, {}), **sizes}
    other_model = tmp_path_factory.mktemp("draft")
    save_checkpoint(directory, kind, "native", changes)
    if kind == STATES:
        save_checkpoint(other_model, "gpt2", "native", {**changes, "layer_types": None})
        return partial(Engine, kernels="torch" if torch else "native", model=str(directory), draft=str(other_model))
    return partial(Engine, kernels="torch" if torch else "native", model=str(directory), has_windows=kind in WINDOWS)


def keeps_blocks_only(make: Make) -> bool:
    """Whether a sibling can begin in the middle of a prompt."""
    return "draft" not in make.keywords


@cache
def asks() -> tuple[Ask, ...]:
    """Requests of every kind: greedy, sampled, penalised, truncated, biased, with siblings and log-probabilities."""
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 4000) for _ in range(rng.choice([1, 3, 15, 16, 17, 40, 90]))] for _ in range(24)]
    story = [rng.randrange(4, 4000) for _ in range(50)]
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.05, "n": 2},
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
        {"temperature": 0.0, "logprobs": 3, "logit_bias": {5: 3.0}},
        {"temperature": 1.0, "bad_words_token_ids": [[7], [8, 9]], "min_tokens": 3, "ignore_eos": False},
    ]
    made = []
    for index, prompt in enumerate(prompts):
        ids = story + prompt if index % 3 == 0 else prompt
        made.append(ask(ids, seed=index, max_tokens=8 + index, **kinds[index % len(kinds)]))
    return tuple(made)


@cache
def one_process(make: Make) -> Make:
    """Engines of the same model whose workers are no groups."""
    return partial(Engine, **{name: value for name, value in make.keywords.items() if name != "grouped"})


@cache
def solo(make: Make) -> Tokens:
    """Each request alone, unchunked, with an empty cache, in one process."""
    engine = one_process(make)(Policy(enable_prefix_caching=False), shares_blocks=True)
    return [token_ids(engine.generate([one]))[0] for one in asks()]


def test_batched_equals_solo(make: Make) -> None:
    engine = make(Policy(enable_prefix_caching=False, max_num_batched_tokens=4096))
    assert token_ids(engine.generate(list(asks()))) == solo(make)
    assert engine.core.replicas["w0"].num_steps < 60, "they ran together"
    left = sum(sum(part.num_left_blocks) for _, plan in engine.plans for part in plan.sliding)
    assert (left > 50) is make.keywords.get("has_windows", False), "windows left blocks behind"


def test_chunked_equals_whole(make: Make) -> None:
    engine = make(Policy(max_num_batched_tokens=64, long_prefill_token_threshold=24, enable_prefix_caching=False))
    assert token_ids(engine.generate(list(asks()))) == solo(make)
    assert engine.counters.num_chunked_prefills > 10


def test_a_prefix_hit_equals_a_cold_run(make: Make) -> None:
    engine = make(Policy(max_num_batched_tokens=256))
    assert token_ids(engine.generate(list(asks()))) == solo(make)
    first = engine.counters.num_prefix_cache_hits
    assert first > 0, "requests that share a beginning found it"
    assert token_ids(engine.generate(list(asks()))) == solo(make)
    assert engine.counters.num_prefix_cache_hits > first + 500, "and the second round found nearly all"


def test_a_prefix_to_the_token_equals_a_cold_run(make: Make) -> None:
    """Prompts that leave others within a block, which is copied; and what goes on behind another one's output."""
    first = list(asks())[:16]
    engine = make(Policy(max_num_batched_tokens=256, enable_partial_block_hits=True))
    found = token_ids(engine.generate(first))
    assert found == solo(make)[:16]
    prompts = [one.prompt[:-3] for one in first if len(one.prompt) > 5]
    prompts += [[*one.prompt, *tokens[0][:-4]] for one, tokens in zip(first, found, strict=True)]
    later = [ask([*prompt, 11, 12], seed=index, max_tokens=6) for index, prompt in enumerate(prompts)]
    before = engine.counters.num_block_copies
    wanted = one_process(make)(Policy(enable_prefix_caching=False)).generate(later)
    assert token_ids(engine.generate(later)) == token_ids(wanted)
    reuses_parts = not engine.core.replicas["w0"].has_partial_hits
    assert (engine.counters.num_block_copies - before > 8) is reuses_parts


def test_preempted_equals_undisturbed(make: Make) -> None:
    growing = [ask([5 + index] * 10, seed=index, max_tokens=80, temperature=1.0) for index in range(8)]
    wanted = token_ids(one_process(make)(Policy(enable_prefix_caching=False)).generate(growing))
    engine = make(num_blocks=16)
    assert token_ids(engine.generate(growing)) == wanted
    assert engine.counters.num_preemptions > 0
    assert token_ids(engine.generate(list(asks()))) == solo(make)


def test_evicted_equals_kept(make: Make) -> None:
    engine = make(num_blocks=20)
    for _ in range(2):
        assert token_ids(engine.generate(list(asks()))) == solo(make)
    assert engine.core.replicas["w0"].pool.num_evictions > 20


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_every_block_size_equals_sixteen(make: Make, block_size: int) -> None:
    if block_size == 8 and make.keywords["kernels"] == "native":
        pytest.skip("smaller than a vector of AVX-512")
    engine = make(block_size=block_size)
    assert token_ids(engine.generate(list(asks()))) == solo(make)


def test_drafts_change_no_token(make: Make) -> None:
    """The model drafts for itself, so that most of what it guesses is accepted; one that keeps states cannot: there
    chance makes most of the tokens, and it is the same for both models."""
    policy = Policy(num_draft_tokens=4, max_num_batched_tokens=4096)
    engine = make(policy, draft=make.keywords.get("draft") or make.keywords.get("model", str(MODEL)))
    engine.join_draft("draft0")
    assert token_ids(engine.generate(list(asks()))) == solo(make)
    assert engine.counters.num_accepted_tokens > 50


def test_two_workers_equal_one(make: Make) -> None:
    engine = make(workers=2)
    assert token_ids(engine.generate(list(asks()))) == solo(make)
    assert all(replica.num_steps > 5 for replica in engine.core.replicas.values()), "both worked"


def test_killed_and_resumed_equals_undisturbed(make: Make) -> None:
    engine = make(Policy(max_num_batched_tokens=128), workers=2)
    ids = [engine.add(one) for one in asks()]
    for _ in range(6):
        engine.step()
    assert engine.core.replicas["w0"].running
    engine.lose("w0")
    engine.step()
    engine.join("w2")
    engine.run()
    outputs = [
        [engine.outputs[i, n].token_ids for n in range(one.params.n)] for i, one in zip(ids, asks(), strict=True)
    ]
    assert outputs == solo(make)
    assert engine.counters.num_worker_losses == 1
    assert engine.counters.num_preemptions > 0


def test_background_beneath_others_equals_undisturbed(make: Make) -> None:
    """It rests, gives its rows and blocks, is computed again, and loses a worker: one request of three is not in the
    background, and these come one by one.  The bundled model drafts for itself."""
    has_draft = "model" not in make.keywords
    policy = Policy(max_num_batched_tokens=256, background_step_tokens=24, num_draft_tokens=3 * has_draft)
    engine = make(policy, workers=2, num_blocks=24, **({"draft": str(MODEL)} if has_draft else {}))
    if has_draft:
        engine.join_draft("draft0")
    ids: dict[int, str] = {}
    for index, one in enumerate(asks()):
        if index % 3:
            ids[index] = engine.add(one, is_background=True)
    for _ in range(12):
        engine.step()
    num_rested = 0
    for index, one in enumerate(asks()):
        if not index % 3:
            ids[index] = engine.add(one)
            for _ in range(4):
                engine.step()
                num_rested += sum(replica.num_resting for replica in engine.core.replicas.values())
        if index == 12:
            engine.lose("w0")
    engine.join("w2")
    engine.run()
    assert not engine.rejected, engine.rejected
    found = engine.outputs_of([ids[index] for index in range(len(asks()))], asks())
    assert token_ids(found) == solo(make)
    assert num_rested > 20 and engine.counters.num_preemptions > 0


def test_siblings_equal_separate_requests_of_their_seeds(make: Make) -> None:
    one = ask([5, 6, 7, 8] * 9, n=4, temperature=1.0, seed=40)
    engine = make()
    (together,) = token_ids(engine.generate([one]))
    assert engine.counters.num_block_copies == (3 if keeps_blocks_only(make) else 0)
    apart = one_process(make)(Policy(enable_prefix_caching=False))
    separate = [ask(one.prompt, temperature=1.0, seed=40 + index) for index in range(4)]
    assert together == [tokens for (tokens,) in token_ids(apart.generate(separate))]
    assert len({tuple(tokens) for tokens in together}) > 1


def test_logprobs_are_those_of_the_solo_run(make: Make) -> None:
    one = ask([5, 6, 7, 8] * 9, logprobs=4, prompt_logprobs=2, temperature=0.9)
    engine = make(Policy(max_num_batched_tokens=64))
    alone = one_process(make)().generate([one])[0][0]
    crowd = engine.generate([*asks()[:6], one])[-1][0]
    assert engine.counters.num_chunked_prefills > 0
    assert alone.token_ids == crowd.token_ids
    assert alone.logprobs == crowd.logprobs
    assert alone.prompt_logprobs == crowd.prompt_logprobs
    assert alone.prompt_logprobs is not None
    assert len(alone.prompt_logprobs) == 36
    assert alone.prompt_logprobs[0] is None
    first = alone.prompt_logprobs[1]
    assert first is not None
    assert first.token_ids[0] == 6, "the second prompt token's own log-probability comes first"
    assert all(entry is not None and len(entry.token_ids) == 5 for entry in alone.logprobs)


@pytest.mark.parametrize("kernels", ["native", "torch", *GROUPS])
def test_where_all_layers_see_a_window_no_more_is_held(kernels: str, tmp_path: Path) -> None:
    """The first pool has numbers, and no memory."""
    changes = {"vocab_size": VOCAB, "max_position_embeddings": 512}
    save_checkpoint(tmp_path, "mistral-window", "native", changes)
    make: Make = partial(Engine, kernels=kernels, model=str(tmp_path), has_windows=True)
    if kernels in GROUPS:
        make = partial(GroupedEngine, grouped=GROUPS[kernels], **{**make.keywords, "kernels": "native"})
    wanted = [token_ids(one_process(make)(shares_blocks=True).generate([one]))[0] for one in asks()[:6]]
    engine = make(Policy(max_num_batched_tokens=48), num_blocks=0, kv_cache_memory=200 << 10, max_model_len=256)
    assert token_ids(engine.generate(list(asks()[:6]))) == wanted
    runner = engine.runners["w0"]
    assert not runner._pool.tensors and len(runner._pool.sliding) == 1
    held = sum(tensor.nbytes for tensor in runner._pool.sliding[0].tensors)
    assert held <= 200 << 10, "less than one sequence of max_model_len would take in all layers"
