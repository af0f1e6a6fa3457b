"""Adapters against PEFT's own merged models, alone and mixed in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpoints import KERNELS, make_runner, oracle_logprobs, random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.lora.adapters import save_adapter
from tests.engine.modeling.test_logits import ALL_LOGPROBS, dense

VARIANTS = ["llama-tied", "llama-bias", "mistral-window", "qwen3", "gpt2", "phi3-partial", "gemma2", "gemma4"]
VARIANTS += ["olmo2", "granite", "qwen3.5"]
MLP = ["gate_proj", "up_proj", "down_proj"]
TARGETS = {"qwen3.5": ["q_proj", "k_proj", "v_proj", "o_proj", *MLP]}  # linear attention is left out
CONFIGS: dict[str, dict[str, Any]] = {
    "attention alone": {"target_modules": ["q_proj", "v_proj"], "r": 1},
    "mlp alone": {"target_modules": ["down_proj"], "r": 64},
    "ranks and alphas by name": {
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\..*": 11},
        "alpha_pattern": {"down_proj": 40, "k_proj": 3},
    },
    "rank-stabilised": {"use_rslora": True, "rank_pattern": {"o_proj": 5}},
    "an expression": {"target_modules": r".*\.layers\.[12]\.(self_attn\.k_proj|mlp\.up_proj)"},
    "one layer": {"target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [1]},
}


ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding and head": ("llama-mha", {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 5}),
    "embedding of a tied head": ("llama-tied", {"target_modules": ["embed_tokens"]}),
    "a tied head": ("llama-tied", {"target_modules": ["lm_head", "v_proj"]}),
    "both, tied": ("llama-tied", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "scaled embeddings, softcap": ("gemma2", {"target_modules": ["embed_tokens", "lm_head"]}),
}


SETTINGS: tuple[dict[str, str], ...] = ({}, {"quantization": "int8"}, {"dtype": "bfloat16"})
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # enough for the processor's tiles
BATCHES: list[tuple[str, str, dict[str, str], dict[str, int]]] = [
    *(("qwen3", kernels, settings, {}) for kernels in KERNELS for settings in SETTINGS),
    *(("qwen3", "native", settings, WIDE) for settings in (*SETTINGS[1:], {"quantization": "int4"})),
    *(("qwen3.5", kernels, {}, {}) for kernels in KERNELS),
]


def assert_oracle_agrees(directory: Path, variant: str, kernels: str, **config: Any) -> None:
    model = save_checkpoint(directory / "base", variant, kernels)
    merged = save_adapter(model, directory / "a", **config)
    runner = make_runner(directory / "base", kernels)
    assert runner.adapters is not None
    driver = Driver(runner)
    digest = runner.adapters.load(directory / "a")
    adapted = driver.add(5, random_prompt(45, seed=1), ALL_LOGPROBS, adapter=digest)
    plain = driver.add(2, random_prompt(19, seed=2), ALL_LOGPROBS)
    driver.generate(5, chunk=7)
    for sequence, oracle in ((adapted, merged), (plain, model)):
        found = dense([*sequence.prompt_logprobs, *sequence.logprobs])
        wanted = oracle_logprobs(oracle, sequence.token_ids[:-1])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    other = oracle_logprobs(model, adapted.token_ids[:-1])
    assert (other - oracle_logprobs(merged, adapted.token_ids[:-1])).abs().max() > 0.05


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_are_those_of_the_merged_model(variant: str, kernels: str, tmp_path: Path) -> None:
    targets = TARGETS.get(variant, "all-linear")
    assert_oracle_agrees(tmp_path, variant, kernels, target_modules=targets)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_means_what_it_means_to_peft(config: str, kernels: str, tmp_path: Path) -> None:
    assert_oracle_agrees(tmp_path, "llama-mha", kernels, **CONFIGS[config])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", ENDS)
def test_embeddings_and_heads_are_what_peft_makes_of_them(case: str, kernels: str, tmp_path: Path) -> None:
    variant, config = ENDS[case]
    assert_oracle_agrees(tmp_path, variant, kernels, scale=0.6, merged=variant == "llama-mha", **config)


@pytest.mark.parametrize(("variant", "kernels", "settings", "sizes"), BATCHES, ids=str)
def test_a_batch_of_two_adapters_and_none_gives_the_bits_of_runs_alone(
    variant: str, kernels: str, settings: dict[str, str], sizes: dict[str, int], tmp_path: Path
) -> None:
    model = save_checkpoint(tmp_path / "base", variant, kernels, sizes)
    save_adapter(model, tmp_path / "a", seed=1, target_modules=TARGETS.get(variant, "all-linear"))
    ends = ["q_proj", "up_proj", "embed_tokens", "lm_head"]
    save_adapter(model, tmp_path / "b", seed=2, r=3, merged=False, target_modules=ends)
    runner = make_runner(tmp_path / "base", kernels, **settings)
    assert runner.adapters is not None
    digests = [runner.adapters.load(tmp_path / name) for name in ("a", "b")]
    # rows 0 and 3 share an adapter, and stand apart
    cases = list(zip((digests[0], digests[1], "", digests[0], ""), (9, 20, 13, 30, 1), strict=True))
    driver = Driver(runner)
    together = [
        driver.add(row, random_prompt(length, seed=row), ALL_LOGPROBS, adapter=adapter)
        for row, (adapter, length) in enumerate(cases)
    ]
    driver.generate(6, chunk=8)
    for row in list(driver.live):
        driver.finish(row)
    for row, (adapter, length) in enumerate(cases):
        alone = driver.add(row, random_prompt(length, seed=row), ALL_LOGPROBS, adapter=adapter)
        driver.generate(6, chunk=64)
        assert alone.token_ids == together[row].token_ids
        assert alone.logprobs == together[row].logprobs
        assert alone.prompt_logprobs == together[row].prompt_logprobs
        driver.finish(row)


@pytest.mark.parametrize("kernels", KERNELS)
def test_gates_of_attention_get_what_the_adapter_of_their_row_has_for_them(kernels: str, tmp_path: Path) -> None:
    """In steps of many rows, beside an adapter that leaves them alone: what stood there before is not added."""
    model = save_checkpoint(tmp_path / "base", "qwen3.5", kernels)
    targets = {"a": TARGETS["qwen3.5"], "b": ["v_proj", "down_proj"]}
    merged = {
        name: save_adapter(model, tmp_path / name, seed=seed, target_modules=given)
        for seed, (name, given) in enumerate(targets.items())
    }
    runner = make_runner(tmp_path / "base", kernels)
    assert runner.adapters is not None
    digests = {name: runner.adapters.load(tmp_path / name) for name in targets}
    driver = Driver(runner)
    for first, second in (("a", "b"), ("b", "a")):
        oracles = dict(enumerate((merged[first], merged[second], model)))
        for row, adapter in enumerate((digests[first], digests[second], "")):
            driver.add(row, random_prompt(60, seed=row), ALL_LOGPROBS, adapter=adapter)
        driver.generate(2)
        for row, oracle in oracles.items():
            sequence = driver.live[row]
            found = dense([*sequence.prompt_logprobs, *sequence.logprobs])
            torch.testing.assert_close(found, oracle_logprobs(oracle, sequence.token_ids[:-1]), atol=1e-4, rtol=0)
            driver.finish(row)
