"""Scales of an fp8 KV cache from a checkpoint: read as exporters write them, used, and refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.description.reading import read_config
from engine.modeling.batch import StepBatch
from engine.modeling.native.decoder import NativeDecoder, build_native
from engine.modeling.torch_decoder.assembly import build_decoder
from engine.modeling.torch_decoder.decoder import Decoder
from engine.modeling.torch_decoder.layer_weights import LayerCache
from engine.weights.formats import Formats
from engine.weights.quantised.reading import read_quantisation
from engine.weights.source import Checkpoint
from kernels.interface import reference_kernels
from kernels.ops.attention.kv_cache import FP8, FP8S
from shared.errors import ModelError
from tests.engine.checkpoints import COMMON, random_prompt, save_checkpoint
from tests.kernels.cpu.natives import load_build

NUM_LAYERS, NUM_KV_HEADS = COMMON["num_hidden_layers"], COMMON["num_key_value_heads"]
CPU = torch.device("cpu")
KEY, VALUE = "self_attn.k_scale", "self_attn.v_scale"
PER_HEAD = torch.tensor([0.02, 0.05])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, "qwen2")
    return tmp_path


def add_scales(directory: Path, scale: Tensor, key: str = KEY, value: str = VALUE, **changes: Any) -> None:
    """Of every layer; `changes` to those of layer 1: None is none at all."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for layer in range(NUM_LAYERS):
        for name, factor in ((key, 1.0), (value, 3.0)):
            tensors[f"model.layers.{layer}.{name}"] = scale.to(scale.dtype) * factor if factor != 1.0 else scale.clone()
    for name, tensor in changes.items():
        full = f"model.layers.1.self_attn.{name}"
        if tensor is None:
            del tensors[full]
        else:
            tensors[full] = tensor
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (KEY, VALUE),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.tensor(0.25), [0.25, 0.25]),
        (torch.tensor([0.25], dtype=torch.bfloat16), [0.25, 0.25]),
        (torch.tensor([0.25, 0.5], dtype=torch.float16), [0.25, 0.5]),
        (torch.tensor([[0.25], [0.5]]), [0.25, 0.5]),
    ],
)
def test_read_as_exporters_write_them(
    directory: Path, key: str, value: str, stored: Tensor, wanted: list[float]
) -> None:
    add_scales(directory, stored, key, value)
    found = Checkpoint(directory, read_config(directory)).kv_scales()
    assert len(found) == NUM_LAYERS
    for layer in found:
        assert layer.keys.tolist() == wanted and layer.keys.dtype == torch.float32
        assert layer.values.tolist() == [3 * one for one in wanted]


def test_a_checkpoint_without_scales_has_none(directory: Path) -> None:
    assert Checkpoint(directory, read_config(directory)).kv_scales() == ()


def test_scales_of_queries_are_not_needed(directory: Path) -> None:
    add_scales(directory, PER_HEAD, q_scale=torch.tensor(1.0))
    assert len(Checkpoint(directory, read_config(directory)).kv_scales()) == NUM_LAYERS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": torch.ones(3)}, r"layers\.1\.self_attn\.k_scale has shape \[3\], expected one .* each of the 2"),
        ({"k_scale": torch.ones(0)}, r"k_scale has shape \[0\]"),
        ({"v_scale": torch.ones(2, 2)}, r"v_scale has shape \[2, 2\]"),
        ({"v_scale": torch.ones(2, dtype=torch.int32)}, "v_scale has dtype torch.int32"),
        ({"k_scale": torch.tensor([1.0, 0.0])}, "k_scale holds .* above zero"),
        ({"k_scale": torch.tensor(float("nan"))}, "k_scale holds .nan"),
        ({"v_scale": torch.tensor(-1.0)}, "v_scale holds"),
        ({"v_scale": torch.tensor(float("inf"))}, "v_scale holds"),
        ({"k_scale": None}, "for layer 1 none of model.layers.1.self_attn.k_scale, model.layers.1.self_attn.k_proj"),
        ({"k_proj.k_scale": torch.tensor(1.0)}, "k_proj.k_scale scales no keys or values of this model, or does so a"),
    ],
)  # fmt: skip
def test_malformed(directory: Path, changes: dict[str, Any], message: str) -> None:
    add_scales(directory, PER_HEAD, **changes)
    with pytest.raises(ModelError, match=message):
        Checkpoint(directory, read_config(directory))


def build(directory: Path, kv: torch.dtype) -> Decoder:
    """In float32 on a CPU."""
    config = read_config(directory)
    formats = Formats(torch.float32, torch.float32, kv)
    return build_decoder(config, Checkpoint(directory, config), formats, reference_kernels(), CPU, max_positions=64)


@torch.inference_mode()
def states(decoder: Decoder | NativeDecoder, block_size: int = 8) -> Tensor:  # [20, hidden_size]
    decoder.allocate(4, block_size)
    prompt = torch.tensor([random_prompt(20, seed=1)])
    one, tables = torch.zeros(1, dtype=torch.int64).numpy(), torch.arange(3)[None].numpy()
    return decoder.forward(StepBatch(one, one, one + 20, one + 20, prompt, tables, block_size))


def test_a_cache_is_scaled_by_them(directory: Path) -> None:
    """Keys of thousands are beyond E4M3, and come back as they were only because they were divided."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for layer in range(NUM_LAYERS):
        tensors[f"model.layers.{layer}.self_attn.k_proj.weight"] *= 1000
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] /= 1000
        for name in ("q_proj", "k_proj"):
            tensors[f"model.layers.{layer}.self_attn.{name}.bias"] *= 0
    save_file(tensors, path)
    exact, cut = states(build(directory, torch.float32)), states(build(directory, FP8))
    add_scales(directory, torch.tensor([20.0, 25.0]), v_scale=torch.tensor([0.01, 0.02]))
    tensors = load_file(path)
    for layer in range(NUM_LAYERS):
        tensors[f"model.layers.{layer}.{VALUE}"] = torch.tensor([0.01])
    save_file(tensors, path)
    decoder = build(directory, FP8)
    scaled = states(decoder)
    memory = decoder._memories[1]
    assert isinstance(memory, LayerCache)
    assert memory.cache.key_head_scales is not None
    assert memory.cache.key_head_scales.tolist() == [20.0, 25.0]
    errors = [float((found - exact).norm() / exact.norm()) for found in (cut, scaled)]
    assert errors[1] < 0.1 < errors[0] / 2


@pytest.mark.parametrize("dtype", FP8S)
def test_native_kernels_scale_a_cache_too(dtype: torch.dtype, tmp_path: Path) -> None:
    """Nearer to torch's decoder with the same scales than to it without any."""
    save_checkpoint(tmp_path, "qwen2", "native")
    with_scales = {"k_scale": torch.tensor([0.4, 2.0]), "v_scale": torch.tensor([0.01, 0.3])}
    plain = states(build(tmp_path, dtype))
    path = tmp_path / "model.safetensors"
    scales = {f"model.layers.{i}.self_attn.{name}": one.clone() for i in range(3) for name, one in with_scales.items()}
    save_file(load_file(path) | scales, path)
    spec, formats = read_config(tmp_path), Formats(torch.float32, torch.float32, dtype)
    native = load_build("native")
    found = states(build_native(spec, Checkpoint(tmp_path, spec), formats, native, max_positions=64), 16)
    wanted = states(build(tmp_path, dtype))
    assert float((found - wanted).norm()) < 0.2 * float((plain - wanted).norm())


CACHE = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("scheme", "served"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": CACHE}, True),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": CACHE | {"num_bits": 4}}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": CACHE | {"dynamic": True}}, False),
        ({"quant_method": "compressed-tensors"}, False),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"}, False),
        ({"quant_method": "gptq"}, False),
        ("fp8", False),
    ],
)
def test_what_config_says_of_it(directory: Path, scheme: Any, served: bool) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": scheme}))
    if served:
        assert read_quantisation(directory) is None, "no weight is quantised"
        return
    with pytest.raises(ModelError, match=r"config.json: quantization_config"):
        read_quantisation(directory)
