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


def halves(spec: ModelSpec) -> ModelSpec:
    return replace(spec, ropes=tuple(replace(rope, interleaved=False) for rope in spec.ropes))


def every_pair(spec: ModelSpec) -> ModelSpec:
    return replace(spec, ropes=tuple(replace(rope, turning=1.0) for rope in spec.ropes))


def unstretched(spec: ModelSpec) -> ModelSpec:
    return replace(spec, ropes=tuple(replace(rope, attention_factor=1.0) for rope in spec.ropes))


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
    "values not normed": ("gemma4", of_attention(value_norm=False)),
    "scores of wide heads scaled as usual": ("gemma4", of_attention(scale=0.0)),
    "layers not scaled": ("gemma4", of_layers(lambda layer: replace(layer, scaled=False))),
    "all pairs turned": ("gemma4", every_pair),
    "rope of halves": ("deepseek-v2", halves),
    "rope of neighbours beside a latent": ("deepseek-v3-halves", neighbours),
    "scores not stretched with the rope": ("deepseek-v2", of_attention(scale=48**-0.5)),
    "cosines not stretched with the rope": ("deepseek-v3", unstretched),
    "experts of all groups": ("deepseek-v2", of_experts(groups=1, kept_groups=1)),
    "one group more": ("deepseek-v3", of_experts(kept_groups=3)),
    "groups by one expert": ("deepseek-v3", of_experts(group_best=1)),
    "no correction": ("deepseek-v3", of_experts(correction=False)),
    "experts not scaled": ("deepseek-v2", of_experts(scale=1.0)),
    "renormalisation left out of sigmoids": ("deepseek-v3", of_experts(renormalise=False)),
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
