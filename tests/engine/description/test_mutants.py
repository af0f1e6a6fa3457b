"""Each part of a description matters to the comparison with transformers: with that part wrong the comparison fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.description.families import FAMILIES, Family
from engine.description.spec import NO_ROPE, AttentionSpec, LayerSpec, ModelSpec
from tests.engine.checkpoints import KERNELS, make_runner, oracle_logprobs, random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.modeling.test_logits import ALL_LOGPROBS, dense

TOLERANCE = 1e-4  # of tests/engine/modeling/test_logits.py
Change = Callable[[ModelSpec], ModelSpec]


def of_layers(change: Callable[[LayerSpec], LayerSpec]) -> Change:
    return lambda spec: replace(spec, layers=tuple(map(change, spec.layers)))


def of_attention(**fields: Any) -> Change:
    return of_layers(lambda layer: replace(layer, attention=replace(heads_of(layer), **fields)))


def heads_of(layer: LayerSpec) -> AttentionSpec:
    assert isinstance(layer.attention, AttentionSpec)
    return layer.attention


def of_experts(**fields: Any) -> Change:
    def change(layer: LayerSpec) -> LayerSpec:
        if layer.mlp.experts is None:
            return layer
        return replace(layer, mlp=replace(layer.mlp, experts=replace(layer.mlp.experts, **fields)))

    return of_layers(change)


def of_model(**fields: Any) -> Change:
    return lambda spec: replace(spec, **fields)


def wider(layer: LayerSpec) -> LayerSpec:
    window = heads_of(layer).window
    return replace(layer, attention=replace(heads_of(layer), window=window + 1 if window else 0))


def neighbours(spec: ModelSpec) -> ModelSpec:
    return replace(spec, ropes=tuple(replace(rope, interleaved=True) for rope in spec.ropes))


def other_rope(layer: LayerSpec) -> LayerSpec:
    return replace(layer, attention=replace(heads_of(layer), rope=0))


MUTANTS: dict[str, tuple[str, Change]] = {
    "renormalisation left out": ("qwen3-moe", of_experts(renormalise=False)),
    "renormalisation added": ("qwen2-moe", of_experts(renormalise=True)),
    "the shared expert's gate left out": ("qwen2-moe", of_experts(shared_gate=False)),
    "one expert fewer": ("mixtral", of_experts(top_k=1)),
    "softmax over all experts": ("gpt-oss", of_experts(score="softmax", renormalise=False)),
    "window off by one": ("mistral-window", of_layers(wider)),
    "window off by one, by turns": ("gemma2", of_layers(wider)),
    "sinks dropped": ("gpt-oss", of_attention(sinks=False)),
    "rope of neighbours": ("qwen3", neighbours),
    "rope where there is none": ("smollm3", of_attention(rope=0)),
    "no rope": ("olmo2", of_attention(rope=NO_ROPE)),
    "one rope for all layers": ("gemma3", of_layers(other_rope)),
    "scores not capped": ("gemma2", of_attention(softcap=0.0)),
    "logits not capped": ("gemma2", of_model(logit_softcap=0.0)),
    "scores scaled as usual": ("granite", of_attention(scale=0.0)),
    "embedding not scaled": ("granite", of_model(embed_scale=1.0)),
    "residuals not scaled": ("granite", of_model(residual_scale=1.0)),
    "logits not scaled": ("granite", of_model(logit_scale=1.0)),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_description_is_noticed(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, change = MUTANTS[name]
    oracle = save_checkpoint(tmp_path, variant, kernels)
    for architecture, family in FAMILIES.items():
        names = tuple(replace(table, unused=("model.",)) for table in family.names)  # tensors that are left out
        monkeypatch.setitem(FAMILIES, architecture, Family(family.title, _changed(family, change), names))
    driver = Driver(make_runner(tmp_path, kernels))
    sequence = driver.add(0, random_prompt(45, seed=1), ALL_LOGPROBS)
    driver.generate(1, chunk=16)
    found = dense([*sequence.prompt_logprobs, *sequence.logprobs])
    wanted = oracle_logprobs(oracle, sequence.token_ids[:-1])
    assert (found - wanted).abs().max() > 10 * TOLERANCE


def _changed(family: Family, change: Change) -> Callable[[Any], ModelSpec]:
    return lambda keys: change(family.describe(keys))
