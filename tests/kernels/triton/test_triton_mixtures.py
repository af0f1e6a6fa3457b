"""Whole models whose experts are a checkpoint's codes, with Triton's kernels: the tokens are those of what these stand
for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.description.reading import read_config
from engine.execution.runner import ModelRunner
from engine.modeling.torch_decoder.decoder import Decoder
from engine.weights.quantised.kept import gpu_bytes, gpu_weights
from engine.weights.source import Checkpoint, decoded_codes
from kernels.ops.experts.experts import ExpertWeights
from kernels.ops.linears.codes import joined
from kernels.ops.linears.decoded_weight import pack_decoded, stack_decoded
from kernels.provider import has_triton
from tests.engine.checkpoints import save_checkpoint
from tests.engine.weights.quantised.encoders import Encode, change_config, float8, gptq
from tests.engine.weights.quantised.test_gpt_oss import save_stacks
from tests.engine.weights.quantised.test_layouts import GPTQ, shuffled

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from tests.kernels.triton.test_triton_model import generate, make_runner

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
SHAPE = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def save_mixture(directory: Path, scheme: dict[str, Any], encode: Encode) -> None:
    """Each expert's matrices as modules of their own; attention in 16 or 32 bits."""
    save_checkpoint(directory, "qwen3-moe", further=SHAPE | {"mlp_only_layers": []})
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name]:
        module = name.removesuffix(".weight")
        encoded = encode(module, tensors[name])
        if encoded is not None:
            del tensors[name]
            tensors |= {module + suffix: tensor.contiguous() for suffix, tensor in encoded[0].items()}
    save_file(tensors, path, metadata={"format": "pt"})
    change_config(directory, quantization_config=scheme)


def experts_of(runner: ModelRunner) -> Iterator[ExpertWeights]:
    assert isinstance(runner._model, Decoder)
    for layer in runner._model._layers:
        assert layer.mixture is not None
        yield from (layer.mixture.gate_up, layer.mixture.down)


def assert_decoded(directory: Path, **settings: Any) -> None:
    runner = make_runner(directory, triton=True, **settings)
    assert all(one.decoded is not None and one.stacked is None for one in experts_of(runner))
    assert generate(runner, 2) == generate(make_runner(directory, triton=False), 2)


def as_gptq(module: str, weight: Tensor) -> Any:
    return gptq(weight)


def as_blocks(module: str, weight: Tensor) -> Any:
    return float8(weight, 32, 32)


def as_sorted(module: str, weight: Tensor) -> Any:
    """One expert's input features in an order of their own."""
    return gptq(weight, order=shuffled(weight) if ".experts.5.down" in module else None)


def as_several(module: str, weight: Tensor) -> Any:
    return gptq(weight, group=64 if ".experts.5.gate" in module or ".experts.5.up" in module else 32)


def test_stacks_of_mxfp4(tmp_path: Path) -> None:
    """gpt-oss's: gate and up take turns in a stack, with biases."""
    save_stacks(tmp_path, "torch", {"num_hidden_layers": 2})
    assert_decoded(tmp_path)


@pytest.mark.parametrize(("scheme", "encode"), [(GPTQ, as_gptq), (BLOCKS, as_blocks)], ids=["gptq", "fp8"])
def test_experts_that_are_modules(scheme: dict[str, Any], encode: Encode, tmp_path: Path) -> None:
    save_mixture(tmp_path, scheme, encode)
    assert_decoded(tmp_path)


def test_codes_of_8_bits_become_codes_of_4(tmp_path: Path) -> None:
    """Where these are asked for; those of 4 bits stay what they are."""
    for name, scheme, encode in (("fp8", BLOCKS, as_blocks), ("gptq", GPTQ, as_gptq)):
        (tmp_path / name).mkdir()
        save_mixture(tmp_path / name, scheme, encode)
        settings: dict[str, Any] = {"quantization": "int4", "quantization_group": 128, "quantization_head": "none"}
        packed = [one.decoded for one in experts_of(make_runner(tmp_path / name, triton=True, **settings))]
        groups = [(one.bits, one.group) for one in packed if one is not None]
        assert groups == ([(4, 64), (4, 96)] if name == "fp8" else [(4, 32)] * 2) * SHAPE["num_hidden_layers"]


def test_experts_that_are_not_alike_are_dequantised(tmp_path: Path) -> None:
    """By what is stored, or by what shows when they are read."""
    several = GPTQ | {"dynamic": {r"+:.*experts\.5\.(gate|up)_proj": {"group_size": 64}}}
    kinds: list[tuple[str, dict[str, Any], Encode]] = [
        ("sorted", GPTQ | {"desc_act": True}, as_sorted), ("several", several, as_several),
    ]  # fmt: skip
    for name, scheme, encode in kinds:
        (tmp_path / name).mkdir()
        save_mixture(tmp_path / name, scheme, encode)
        stay = [one.decoded is not None for one in experts_of(make_runner(tmp_path / name, triton=True))]
        assert stay == [name == "sorted", name == "several"] * SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("name", ["mxfp4", "gptq", "fp8"])
def test_bytes_that_are_known_before(name: str, tmp_path: Path) -> None:
    """Of powers of two and of float32 all of them, of scales in float16 the most."""
    if name == "mxfp4":
        save_stacks(tmp_path, "torch", {})
    else:
        save_mixture(tmp_path, *((GPTQ, as_gptq) if name == "gptq" else (BLOCKS, as_blocks)))
    spec = read_config(tmp_path)
    source, layers = Checkpoint(tmp_path, spec), spec.num_layers
    found = gpu_weights(spec, source.tensors, source.quantised_as)
    assert [len(weights) for weights, _ in found] == [5 if name == "mxfp4" else 7] * 2 * layers
    for weights, form in found:
        codes = [decoded_codes(source, parts) for parts in weights]
        packed = stack_decoded([pack_decoded(joined(one)) for one in codes if one is not None])
        taken = packed.codes.nbytes + packed.scales.nbytes + (packed.zeros.nbytes if name == "gptq" else 0)
        spared = packed.scales.nbytes if name == "gptq" else 0
        assert taken == gpu_bytes(weights, form) - spared
