"""Quantised checkpoints on their way to a runner: the bundled model, the fingerprint, and the memory that it takes."""

from __future__ import annotations

import mmap
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.description.ranks import Place, cut_tensors
from engine.description.reading import read_config
from engine.weights.source import Checkpoint, decoded_codes, kept_codes
from tests.engine.checkpoints import KERNELS, make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.weights.quantised.encoders import change_config, gptq, quantise

BUNDLED = Path(__file__).resolve().parents[4] / "models" / "pageant-stories"
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
SIZE, LAYERS = 1024, 2
MATRICES = 7 * LAYERS


def symmetric(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return gptq(weight, symmetric=True)


def greedy(directory: Path, kernels: str, **settings: Any) -> list[int]:
    vocab_size = read_config(directory).vocab_size
    driver = Driver(make_runner(directory, kernels, **settings))
    sequence = driver.add(0, random_prompt(24, seed=5, vocab_size=vocab_size))
    driver.generate(16)
    return sequence.output


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundled model in GPTQ, and with the weights that this stands for in float32."""
    packed, plain = (tmp_path_factory.mktemp(name) for name in ("packed", "plain"))
    tensors = load_file(BUNDLED / "model.safetensors")
    codes, values = dict(tensors), {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name, tensor in tensors.items() if "layers" in name and tensor.ndim == 2]:
        stored, values[name] = symmetric(tensors[name])
        del codes[name]
        codes |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in stored.items()}
    for directory, found in ((packed, codes), (plain, values)):
        shutil.copyfile(BUNDLED / "config.json", directory / "config.json")
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, directory / "model.safetensors")
    change_config(packed, quantization_config=GPTQ)
    return packed, plain


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_bundled_model_in_gptq(kernels: str, pair: tuple[Path, Path]) -> None:
    packed, plain = pair
    assert greedy(packed, kernels, dtype="float32") == greedy(plain, kernels, dtype="float32")


@pytest.mark.parametrize("settings", [{"quantization": "int8", "dtype": "float32"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_other_formats_are_made_of_the_dequantised_weights(
    settings: dict[str, str], kernels: str, pair: tuple[Path, Path]
) -> None:
    packed, plain = pair
    assert greedy(packed, kernels, **settings) == greedy(plain, kernels, **settings)


VARIANTS = ["phi3", "gpt2", "gemma2", "mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3", "qwen3-next", "qwen3.5"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_part_is_taken_of_codes(variant: str, tmp_path: Path) -> None:
    """Joined, transposed, reordered, absorbed, by expert: as of the same weights stored plainly."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    save_checkpoint(plain, variant, "native")
    shutil.copytree(plain, packed)
    is_transposed = variant == "gpt2"
    codes, values = (load_file(directory / "model.safetensors") for directory in (packed, plain))
    linears = [name for name, tensor in codes.items() if tensor.ndim == 2 and tensor.shape[1] % 8 == 0]
    linears = [name for name in linears if ".weight" in name and len(codes[name]) % 8 == 0 and "embed" not in name]
    for name in [name for name in linears if re.search(r"[.]\d+[.]", name)]:
        weight = codes.pop(name)
        stored, found = symmetric(weight.T if is_transposed else weight)
        values[name] = found.T.contiguous() if is_transposed else found
        codes |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in stored.items()}
    save_file(codes, packed / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, plain / "model.safetensors")
    change_config(packed, quantization_config=GPTQ)
    spec = read_config(plain)
    first, second = Checkpoint(packed, spec), Checkpoint(plain, spec)
    quantised = 0
    for part in first.tensors.parts():
        assert torch.equal(first.take(part), second.take(part)), part
        taken = first.take_codes(part)
        if taken is not None:
            quantised += 1
            assert torch.equal(taken.dequantised(), second.take(part)), part
    assert quantised >= 4


def test_ranks_that_add_have_the_numbers_of_their_input_features(tmp_path: Path) -> None:
    """Codes are taken by rows alone, and stay codes where a rank has rows."""
    quantise(tmp_path, GPTQ, lambda module, weight: symmetric(weight))
    spec = read_config(tmp_path)
    source = Checkpoint(tmp_path, spec)
    cut = [cut_tensors(spec, source.tensors, Place(rank, 2, reduces=True)) for rank in range(2)]
    for layer, whole in enumerate(source.tensors.layers):
        for slot in ("output", "down"):
            parts = [one.layers[layer][slot] for one in cut]
            assert [(kept_codes(source, own), decoded_codes(source, own)) for own in parts] == [(None, None)] * 2
            pieces = [source.take(part) for (part,) in parts]
            assert torch.equal(torch.cat(pieces, dim=1), source.take(whole[slot][0]))
        for slot in ("qkv", "gate_up"):
            each = [decoded_codes(source, one.layers[layer][slot]) for one in cut]
            for index, part in enumerate(whole[slot]):
                pieces = [codes[index].dequantised() for codes in each if codes is not None]
                assert torch.equal(torch.cat(pieces), source.take(part))


def test_the_fingerprint_says_how_tensors_are_read(tmp_path: Path) -> None:
    scheme = GPTQ | {"sym": False}
    quantise(tmp_path, scheme, lambda module, weight: gptq(weight))
    first = make_runner(tmp_path, "torch").fingerprint
    change_config(tmp_path, quantization_config=scheme | {"checkpoint_format": "gptq_v2"})
    second = make_runner(tmp_path, "torch").fingerprint
    assert first is not None and second is not None
    assert first.weights == second.weights and first.config != second.config


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_one_matrix_is_dequantised_at_a_time(tmp_path: Path) -> None:
    shape = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_hidden_layers": LAYERS, "head_dim": SIZE // 4}
    quantise(tmp_path, GPTQ, lambda module, weight: symmetric(weight), further=shape | {"num_key_value_heads": 4})
    source = Checkpoint(tmp_path, read_config(tmp_path))
    parts = [part for part in source.tensors.parts() if source.quantised_as(part) is not None]
    assert len(parts) == MATRICES and all(part.shape == (SIZE, SIZE) for part in parts)
    each, begin, most = 4 * SIZE * SIZE, resident(), 0
    for part in parts:
        assert float(source.take(part).abs().sum()) > 0
        most = max(most, resident() - begin)
    codes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert most < 4 * each + codes, "not all matrices, though nothing was released"
    assert MATRICES * each > 2 * (4 * each + codes)
    source.release()
    assert torch.equal(source.take(parts[0]), source.take(parts[0])), "they can be read again"
