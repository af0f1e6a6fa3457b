"""Codes that stay as they are stored: which, that products are those of the reference, and what they take in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.description.reading import read_config, tensors_of
from engine.modeling.native.layers import LayerPacker
from engine.weights.formats import Formats
from engine.weights.plain import DummyWeights
from engine.weights.quantised.kept import decoded_bytes, decoded_slots, kept_slots, packed_bytes
from engine.weights.source import Checkpoint
from kernels.ops.linears.codes import INT4, UINT4
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import make_runner, random_prompt
from tests.engine.driver import Driver
from tests.engine.weights.quantised.encoders import Encoded, change_tensors, gptq, quantise
from tests.engine.weights.quantised.test_layouts import GPTQ, LAYOUTS, SYMMETRIC, shuffled
from tests.engine.weights.quantised.test_makers import FIXTURES
from tests.kernels.cpu.natives import load_build

ROOT = Path(__file__).resolve().parents[4]
F32, I8 = torch.float32, torch.int8
NARROW, WIDE, OCTETS, PLAIN = [INT4] * 4, [UINT4] * 4, [I8] * 4, [F32] * 4
# fixture -> formats of a layer's qkv, output, gate_up and down; what is not named is dequantised
KEPT = {
    "auto-round-awq": WIDE,
    "auto-round-gptq": NARROW,
    "auto-round-own": [F32, F32, INT4, INT4],  # 8 bits in groups
    "awq-asymmetric": WIDE,
    "awq-symmetric": NARROW,
    "ct-w4a16": [*NARROW[:3], F32],  # the rest of these is not quantised
    "ct-w4a16-actorder": [*NARROW[:3], F32],
    "ct-w4a16-asymmetric": [*WIDE[:3], F32],
    "ct-w4a16-channel": [*NARROW[:3], F32],
    "ct-w8a16": [*OCTETS[:3], F32],
    "ct-w8a8-dynamic": [*OCTETS[:3], F32],
    "ct-w8a8-static": [*OCTETS[:3], F32],
    "gptq-4-asymmetric": WIDE,
    "gptq-4-symmetric": NARROW,
    "gptq-8-channel": OCTETS,
}
LAYOUT_KEPT = {
    "gptq-v1": WIDE,
    "gptq-symmetric-v2-zeros-as-v1": NARROW,
    "gptq-order": WIDE,
    "gptq-all-inputs": WIDE,
    "gptq-8-bits": PLAIN,  # asymmetric
    "gptq-dynamic": [F32, INT4, INT4, F32],  # keys in float32 beside, and 8 bits in groups
    "awq": WIDE,
    "mixed": PLAIN,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
REFERENCE = {"quantization": "int4", "quantization_head": "none", "dtype": "float32"}


def packed_formats(directory: Path) -> list[torch.dtype]:
    native, spec = load_build("native"), read_config(directory)
    source = Checkpoint(directory, spec)
    packer = LayerPacker(spec, source, Formats(F32, F32, F32, keeps_codes=True), native)
    linears = packer.layer(spec.layers[0], source.tensors.layers[0], None).linears
    return [linears[slot].dtype for slot in ("qkv", "output", "gate_up", "down")]


def logprobs(directory: Path, kernels: str, **settings: Any) -> Tensor:  # [num_tokens]
    vocab_size = read_config(directory).vocab_size
    driver = Driver(make_runner(directory, kernels, kv_cache_dtype="float32", **settings))
    for row in range(4):
        prompt = random_prompt(40, seed=row, vocab_size=vocab_size)
        driver.add(row, prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    driver.generate(1, chunk=30)
    sequences = driver.live.values()
    return torch.tensor([one.logprobs[0] for sequence in sequences for one in sequence.prompt_logprobs])


def check_near(directory: Path) -> float:
    """What is computed by itself, from what codes stand for; returns by how much on average."""
    exact = logprobs(directory, "native", dtype="float32")
    error = float((logprobs(directory, "native") - exact).abs().mean())
    assert 0 < error < 0.1
    assert float((logprobs(directory, "torch") - exact).abs().mean()) < 0.02, "torch by itself dequantises"
    return error


def check_products(directory: Path) -> None:
    """As the reference has them; a last bit may move what is rounded to 8 bits."""
    native, reference = (logprobs(directory, kernels, **REFERENCE) for kernels in ("native", "torch"))
    assert float((native - reference).abs().mean()) < 0.3 * check_near(directory)


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_checkpoints_of_the_makers(fixture: Path) -> None:
    expected = KEPT.get(fixture.name)
    runner = make_runner(fixture, "native")
    assert runner.fingerprint is not None
    assert runner.fingerprint.quantization == ("none" if expected is None else "as stored")
    if expected is not None:
        assert packed_formats(fixture) == expected
        (check_near if F32 in expected else check_products)(fixture)


@pytest.mark.parametrize("name", LAYOUT_KEPT)
def test_layouts(name: str, tmp_path: Path) -> None:
    scheme, encode, file = LAYOUTS[name]
    quantise(tmp_path, scheme, encode, file=file)
    assert packed_formats(tmp_path) == LAYOUT_KEPT[name]
    if F32 not in LAYOUT_KEPT[name]:
        check_products(tmp_path)


def test_fingerprints_tell_codes_from_what_they_stand_for(tmp_path: Path) -> None:
    quantise(tmp_path, SYMMETRIC, lambda module, weight: gptq(weight, symmetric=True))
    settings: list[dict[str, str]] = [{}, {"quantization": "none"}, {"dtype": "float32"}, {"quantization": "int4"}]
    prints = [make_runner(tmp_path, "native", **one).fingerprint for one in settings]
    found = [(one.quantization, one.weights, one.name) for one in prints if one is not None]
    assert [one[0] for one in found] == ["as stored", "none", "none", "int4, groups of 64, codes as stored"]
    assert len({one[1] for one in found}) == 1 and len({one[2] for one in found}) >= 3


def test_orders_that_differ_are_dequantised(tmp_path: Path) -> None:
    """Which shows only when they are read; a gate and an up of one order stay, whatever the queries do."""

    def encode(module: str, weight: Tensor) -> Encoded:
        order = shuffled(weight)
        return gptq(weight, order=np.flip(order).copy() if module.endswith("k_proj") else order)

    quantise(tmp_path, GPTQ | {"desc_act": True}, encode)
    assert packed_formats(tmp_path) == [F32, UINT4, UINT4, UINT4]
    check_near(tmp_path)


def test_scales_that_need_float32(tmp_path: Path) -> None:
    quantise(tmp_path, SYMMETRIC, lambda module, weight: gptq(weight, symmetric=True))

    def widen(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("up_proj.scales")]:
            tensors[name] = tensors[name].float() * (1 + 2**-20)

    change_tensors(tmp_path, widen)
    assert packed_formats(tmp_path) == [INT4, INT4, UINT4, INT4]


def test_a_head_in_codes(tmp_path: Path) -> None:
    model = quantise(
        tmp_path, SYMMETRIC, lambda module, weight: gptq(weight, symmetric=True), further={"vocab_size": 208}
    )
    stored, _ = gptq(model.lm_head.weight.detach(), symmetric=True)

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors |= {f"lm_head{suffix}": tensor for suffix, tensor in stored.items()}

    change_tensors(tmp_path, change)
    check_products(tmp_path)


WEIGHED = """
import sys
from pathlib import Path
from engine.loading.load import load_runner
from shared.config import Settings

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10

def load(directory):
    load_runner(Settings.of(model=directory, kernels="native", num_blocks=4, max_model_len=32))

load(sys.argv[1])
begin = peak()
load(sys.argv[2])
print(peak() - begin)
"""


@pytest.mark.parametrize("scheme", [SYMMETRIC | {"group_size": 64}, FP8], ids=["gptq", "fp8"])
def test_memory_is_that_of_the_codes(tmp_path: Path, scheme: dict[str, Any]) -> None:
    """At the peak of loading: neither dequantised matrices, nor pages of the file, but of one layer."""
    load_build("native")
    for name, size in (("small", 64), ("large", 512)):
        (tmp_path / name).mkdir()
        packed = write_random(tmp_path / name, size, scheme)
    command = [sys.executable, "-c", WEIGHED, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    taken = int(done.stdout.splitlines()[-1])
    assert 0.95 * packed < taken < 1.1 * packed + (4 << 20), "bytes; the small model is freed; 4 MiB of activations, KV"


def write_random(directory: Path, size: int, scheme: dict[str, Any]) -> int:
    """A random checkpoint of 48 layers; returns the bytes of its weights in memory, embedding and head among them."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": size,
        "intermediate_size": 3 * size,
        "num_hidden_layers": 48,
        "num_attention_heads": size // 64,
        "max_position_embeddings": 64,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": scheme,
    }
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    spec = read_config(directory)
    made, tensors, generator = DummyWeights(spec), {}, torch.Generator().manual_seed(1)
    for part in tensors_of(spec).parts():
        if "layers" not in part.name or len(part.shape) < 2:
            tensors[part.name] = made.take(part).bfloat16()
            continue
        (rows, columns), module = part.shape, part.name.removesuffix(".weight")
        if scheme == FP8:
            numbers = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
            scales = torch.full((-(-rows // 128), -(-columns // 128)), 1 / 700)
            tensors |= {f"{module}.weight": numbers, f"{module}.weight_scale_inv": scales}
            continue
        tensors[f"{module}.qweight"] = torch.randint(-(2**31), 2**31, (columns // 8, rows), generator=generator).int()
        tensors[f"{module}.scales"] = torch.full((columns // 64, rows), 2**-9).bfloat16()
    save_file(tensors, directory / "model.safetensors")
    source = Checkpoint(directory, spec)
    find, count = (decoded_slots, decoded_bytes) if scheme == FP8 else (kept_slots, packed_bytes)
    kept = find(spec, source.tensors, source.quantised_as)
    return sum(count(parts, one) for parts, one in kept) + 2 * 2 * 1000 * size
