"""Which caches, pools and weights of a model are whose, where only some of its layers have a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.description.families import FAMILIES
from engine.description.reading import parse_config
from engine.description.spec import AttentionSpec, LayerSpec, ModelSpec
from engine.loading.memory import WindowBytes, block_bytes
from engine.modeling.batch import StepBatch
from engine.modeling.kv_pool import KVLayout
from engine.weights.digest import DigestMemory, WeightDigest
from tests.engine.checkpoints import COMMON, HYBRID_VARIANTS, KERNELS, VOCAB, make_runner, save_checkpoint

WINDOW, BLOCKS, SIZE = 24, 6, 16
CHUNKS = (20, 23, 1)
TURNS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]


def with_window(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.attention, AttentionSpec)
    return replace(layer, attention=replace(layer.attention, window=WINDOW))


def sliding(spec: ModelSpec) -> ModelSpec:
    """Of whose two layers with a cache the last one sees a window."""
    return replace(spec, layers=(*spec.layers[:-1], with_window(spec.layers[-1])))


def hidden_states(model: Any, tables: Sequence[Sequence[int]], windows: Sequence[tuple[int, int]]) -> Tensor:
    """Of one sequence in row 1, chunk by chunk."""
    pool = model.allocate(BLOCKS, SIZE, windows, num_states=2)
    assert [len(pool.tensors), *(len(one.tensors) for one in pool.sliding)] == ([2, 2] if windows else [4])
    tokens = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(3))
    columns = np.array([[0] * sum(map(len, tables)), [block for table in tables for block in table]])
    found, computed = [], 0
    for count in CHUNKS:
        row, before, both = (np.array([value]) for value in (1, computed, count))
        found.append(model.forward(StepBatch(row, before, both, both, tokens, columns, SIZE)).clone())
        computed += count
    return torch.cat(found)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_layer_with_a_window_has_its_pool_behind_layers_without_a_cache(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["Qwen3_5ForCausalLM"]
    save_checkpoint(tmp_path, "qwen3.5", kernels, further={"layer_types": TURNS})
    full: Any = make_runner(tmp_path, kernels)._model
    without = hidden_states(full, ([4, 1, 3],), ())
    monkeypatch.setitem(
        FAMILIES, "Qwen3_5ForCausalLM", family._replace(describe=lambda keys: sliding(family.describe(keys)))
    )
    model: Any = make_runner(tmp_path, kernels)._model
    one = hidden_states(model, ([4, 1, 3],), ())
    assert torch.equal(one[:WINDOW], without[:WINDOW]) and not torch.equal(one[WINDOW:], without[WINDOW:])
    assert torch.equal(hidden_states(model, ([4, 1, 3], [0, 5, 2]), [(WINDOW, BLOCKS)]), one)


def test_only_layers_with_a_cache_take_memory_of_it() -> None:
    family, own = HYBRID_VARIANTS["qwen3.5"]
    given = {"architectures": [f"{family}ForCausalLM"], **COMMON, **own, "layer_types": TURNS}
    spec = sliding(parse_config(given))
    sizes = KVLayout(spec.attentions, torch.float32, torch.device("cpu")).layer_bytes(SIZE)
    heads = spec.attentions[0]
    each = SIZE * 2 * heads.num_kv_heads * heads.head_dim * 4
    assert sizes == [each, each] and spec.windows(64) == (WINDOW,) and spec.head_shapes == ((2, 24),)
    assert block_bytes(spec, sizes, (WINDOW,)) == (each, (WindowBytes(WINDOW, each),))
    assert block_bytes(spec, sizes, ()) == (2 * each, ())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", HYBRID_VARIANTS)
def test_the_digest_is_of_the_tensors_as_they_are_stored(
    variant: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though some are taken in parts, each several times, and others are packed by twos."""
    monkeypatch.setattr(DigestMemory, "recall", lambda self, identity: "")
    monkeypatch.setattr(DigestMemory, "remember", lambda self, identity, value: None)
    monkeypatch.setattr("engine.weights.digest.SMALL", 64)
    save_checkpoint(tmp_path, variant, kernels)
    wanted = WeightDigest()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        wanted.add(name, tensor)
    found = make_runner(tmp_path, kernels).fingerprint
    assert found is not None and found.weights == wanted.value
