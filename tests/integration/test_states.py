"""Models whose layers keep states: what computes a token twice, or begins where another sequence stands, changes none.

The list of tests/integration/test_equivalences.py is run for one such model too; here are beams, grammars that are
late, drafts that are wrong, siblings, and few rows.  Each test also checks that the thing it is about did happen.
"""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.constraints.row_automata import Held
from engine.sampling.processing import Flags
from services.draft.load import load_proposer
from services.scheduler.state.policy import Policy
from shared.errors import ConfigError
from shared.requests.beam import Beam
from tests.engine.checkpoints import save_checkpoint
from tests.integration.drafts.test_speculation import Guesser
from tests.integration.engine import MODEL, SETTINGS, Ask, Engine, ask, token_ids
from tests.integration.outputs.test_grammars import held_asks
from tests.integration.test_equivalences import VOCAB, Make, Tokens, asks


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the bundled model's tokenizer."""
    made = tmp_path_factory.mktemp("states")
    save_checkpoint(made, "qwen3.5", "native", {"vocab_size": VOCAB, "max_position_embeddings": 512})
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, made)
    return made


@pytest.fixture(scope="module", params=["native", "torch"])
def make(request: pytest.FixtureRequest, directory: Path) -> Make:
    return partial(Engine, kernels=request.param, model=str(directory))


def solo(make: Make, some: list[Ask]) -> Tokens:
    engine = make(Policy(enable_prefix_caching=False))
    return [token_ids(engine.generate([one]))[0] for one in some]


# ---- what is computed twice


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_drafts_that_are_wrong_change_no_token(make: Make, acceptance: str) -> None:
    some = list(asks()[:12])
    engine = make(Policy(num_draft_tokens=3, max_num_batched_tokens=4096, acceptance=acceptance), draft="ngram")
    engine.join_draft("guesser", Guesser())
    found = token_ids(engine.generate(some))
    counters = engine.counters
    assert counters.num_draft_tokens - counters.num_accepted_tokens > 100
    if acceptance == "coupled":
        assert found == solo(make, some)


def test_late_grammars_and_wild_drafts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    some, rng, on_time = list(held_asks()[::3]), random.Random(9), Held.allowed
    expected = solo(make, some)

    def allowed(self: Held, draft_token_ids: list[int]) -> Flags | None:
        return None if rng.random() < 0.3 else on_time(self, draft_token_ids)

    monkeypatch.setattr(Held, "allowed", allowed)
    for policy in (Policy(max_num_batched_tokens=64), Policy(num_draft_tokens=3, max_num_batched_tokens=4096)):
        engine = make(policy, draft="ngram")
        if policy.num_draft_tokens:
            engine.join_draft("guesser", Guesser())
        assert token_ids(engine.generate(some)) == expected
        assert engine.counters.num_late_masks > 30


def test_the_last_token_of_a_held_prompt_is_computed_by_itself(make: Make) -> None:
    """So that where its sample is late no more than that is computed again."""
    one = next(one for one in held_asks() if len(one.prompt) > 16 and one.params.n == 1)
    engine = make(Policy(enable_prefix_caching=False))
    engine.generate([one])
    first, second, *_ = (plan.num_scheduled_tokens for _, plan in engine.plans)
    assert [first, second] == [[len(one.prompt) - 1], [1]]


# ---- what begins where another stands


def test_beams_take_states_over(make: Make, directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    rng = random.Random(4)
    some = [
        ask(
            [rng.randrange(4, 4000) for _ in range(length)],
            beam=Beam(3 + place, 1.0), temperature=None, n=3, max_tokens=10,
        )
        for place, length in enumerate((3, 17, 40))
    ]  # fmt: skip
    alone = [token_ids(make(kv_cache_dtype="float32").generate([one]))[0] for one in some]
    oracle: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    oracle.generation_config.eos_token_id = None
    for one, found in zip(some, alone, strict=True):
        prompt, beam = torch.tensor([one.prompt]), one.params.beam
        assert beam is not None
        wanted = oracle.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, num_beams=beam.width, pad_token_id=-1,
            num_return_sequences=3, do_sample=False,
        )  # fmt: skip
        assert found == [row[len(one.prompt) :].tolist() for row in wanted]
    settings: dict[str, Any] = {"num_blocks": 18, "max_num_seqs": 7, "max_model_len": 96, "kv_cache_dtype": "float32"}
    engine = make(Policy(max_num_batched_tokens=24), **settings)
    assert token_ids(engine.generate([*some, ask([7] * 20, max_tokens=30)]))[:3] == alone
    assert engine.counters.num_preemptions
    assert sum(len(plan.state_forks) for _, plan in engine.plans) > 10


def test_siblings_and_what_follows_begin_with_a_snapshot(make: Make) -> None:
    """Behind the last block that a cache can hold: a prompt of 100 tokens in blocks of 16 is cut at 96."""
    prompt = [random.Random(1).randrange(4, 4000) for _ in range(100)]
    some = [ask(prompt, n=3, temperature=1.0, seed=5), ask([*prompt, *range(20, 50)], temperature=1.0)]
    engine = make(Policy())
    found = [token_ids(engine.generate([one]))[0] for one in some]
    assert found == solo(make, some)
    assert engine.counters.num_prefix_cache_hits == 3 * 96
    loads = [load for _, plan in engine.plans for load in plan.state_loads]
    assert len(loads) == 3 and len({snapshot for _, snapshot, _ in loads}) == 1
    assert not engine.counters.num_block_copies


def test_what_prompts_have_in_common_is_found_once_it_was_seen_twice(make: Make) -> None:
    rng = random.Random(2)
    common = [rng.randrange(4, 4000) for _ in range(150)]
    some = [ask([*common, *(rng.randrange(4, 4000) for _ in range(60))], max_tokens=4, seed=seed) for seed in range(3)]
    engine = make(Policy())
    hits, found = [], []
    for one in some:
        before = engine.counters.num_prefix_cache_hits
        found += token_ids(engine.generate([one]))
        hits.append(engine.counters.num_prefix_cache_hits - before)
    assert found == solo(make, some)
    assert hits == [0, 0, 144]


# ---- room


def test_rows_are_as_many_as_there_is_memory_for_states(directory: Path) -> None:
    some = list(asks()[:8])
    make = partial(Engine, kernels="native", model=str(directory))
    engine = make(Policy(), num_blocks=0, kv_cache_memory=1 << 20, max_model_len=256)
    capacity = engine.runners["w0"].capacity
    assert capacity.keeps_states and capacity.num_snapshots > 0
    assert 0 < capacity.max_num_seqs < SETTINGS.scheduling.max_num_seqs
    assert token_ids(engine.generate(some)) == solo(make, some)


def test_without_room_for_a_state_the_start_ends(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"this model keeps a state of .* GiB for each sequence"):
        Engine(kernels="native", model=str(directory), num_blocks=0, kv_cache_memory=100_000)


def test_it_cannot_be_a_draft(directory: Path) -> None:
    with pytest.raises(ConfigError, match="linear attention, whose states cannot take tokens back"):
        load_proposer(SETTINGS.replace(draft=str(directory)))
