"""The digest of a checkpoint: of its content alone, the same in either way to make it, and made once per file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.execution.loading import load_runner
from engine.modeling.weight_digest import DigestMemory, WeightDigest, identity_of
from kernels.cpu import build
from kernels.cpu.native import Native
from kernels.ops import digest
from kernels.ops.digest import Sums
from shared.config import Settings
from shared.messages.fingerprint import Fingerprint, difference
from shared.text_digest import text_fingerprint
from tests.kernels.natives import BUILDS, load_build

MODEL = Path(__file__).resolve().parents[2] / "models" / "pageant-stories-draft"
SIZES = (0, 1, 4, 63, digest.CHUNK - 1, digest.CHUNK, 5 * digest.CHUNK + 12345)


def content(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("size", SIZES)
def test_native_sums_are_those_of_the_reference(name: str, size: int) -> None:
    data = content(size)
    assert np.array_equal(load_build(name).chunk_sums(data), digest.chunk_sums(data))


def test_the_reference_is_what_its_formula_says() -> None:
    """In Python's own integers."""
    data = content(digest.CHUNK)
    words, keys = [int(word) for word in data.view(np.uint32)], [int(key) for key in digest.key_words()]
    for sums, shift in zip(digest.chunk_sums(data)[0], (0, digest.SHIFT), strict=True):
        pairs = (
            ((words[i] + keys[i + shift]) % 2**32) * ((words[i + 1] + keys[i + shift + 1]) % 2**32)
            for i in range(0, len(words), 2)
        )
        assert int(sums) == sum(pairs) % 2**64


def test_every_bit_counts() -> None:
    data = content(3 * digest.CHUNK)
    before = digest.chunk_sums(data)
    for place in np.random.default_rng(1).integers(0, len(data), 200):
        for flipped in (1, 128):
            data[place] ^= flipped
            assert not np.array_equal(digest.chunk_sums(data), before)
            data[place] ^= flipped
    swapped = np.concatenate([data[4:8], data[:4], data[8:]])
    assert not np.array_equal(digest.chunk_sums(swapped), before)


def value(tensors: dict[str, Tensor], threads: int = 0) -> str:
    made = WeightDigest(threads=threads)
    for name, tensor in tensors.items():
        made.add(name, tensor)
    return made.value


def test_names_formats_shapes_and_content_count_and_the_order_does_not() -> None:
    one, two = torch.arange(8.0).reshape(2, 4), torch.ones(3, dtype=torch.bfloat16)
    wanted = value({"a": one, "b": two})
    assert value({"b": two, "a": one}) == value({"a": one, "b": two}, threads=2) == wanted
    others = [
        {"a": two, "b": one}, {"a": one}, {"a": one.reshape(4, 2), "b": two}, {"a": -one, "b": two},
        {"a": one, "b": two.view(torch.int16)}, {"a": one, "c": two}, {"a": one, "b": torch.ones(4, dtype=two.dtype)},
    ]  # fmt: skip
    assert len({wanted, *map(value, others)}) == len(others) + 1


def fingerprint_of(model: Path, **settings: str) -> Fingerprint:
    found = load_runner(Settings.of(model=str(model), num_blocks=8, **settings)).fingerprint
    assert found is not None
    return found


def test_a_second_start_reads_no_weight_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a file is another: then its digest is made anew, though place, size and time of change are the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    added: list[str] = []
    add = WeightDigest.add

    def counted(self: WeightDigest, name: str, tensor: Tensor) -> None:
        added.append(name)
        add(self, name, tensor)

    monkeypatch.setattr(WeightDigest, "add", counted)
    first = fingerprint_of(model, kernels="torch")
    assert len(added) == len(load_file(model / "model.safetensors"))
    added.clear()
    assert fingerprint_of(model, kernels="torch") == first and not added
    before = (model / "model.safetensors").stat()
    stored = bytearray((model / "model.safetensors").read_bytes())
    stored[-2] ^= 1
    with (model / "model.safetensors").open("r+b") as file:
        file.write(stored)
    os.utime(model / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (model / "model.safetensors").stat().st_size == before.st_size
    words = difference(fingerprint_of(model, kernels="torch"), first, "a")
    assert added and words.startswith("its weights is '") and ";" not in words


def test_native_and_torch_see_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_build("native")
    found = []
    for kernels in ("native", "torch"):
        monkeypatch.setattr(DigestMemory, "recall", lambda self, identity: "")
        found.append(fingerprint_of(MODEL, kernels=kernels, dtype="float32"))
    one, other = found
    assert one.weights == other.weights
    assert all(part in difference(one, other, "a") for part in ("executor", "numeric_class"))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_torch_sums_by_the_native_library_where_it_is_compiled(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one numpy does it, to the same value: a worker of torch never waits for a compiler."""
    load_build("native")
    wanted = value(load_file(MODEL / "model.safetensors"))
    cache = tmp_path / "cache"
    if not is_compiled:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(build, "PREBUILT", tmp_path)
    native_copy, calls = Native.copy, []

    def counted(self: Native, source: Tensor, out: Tensor, sums: Sums | None = None) -> Tensor:
        calls.append(sums is not None)
        return native_copy(self, source, out, sums)

    monkeypatch.setattr(Native, "copy", counted)
    monkeypatch.setattr(DigestMemory, "recall", lambda self, identity: "")
    monkeypatch.setattr(DigestMemory, "remember", lambda self, identity, value: None)
    assert fingerprint_of(MODEL, kernels="torch").weights == wanted
    assert any(calls) == is_compiled
    assert not list(cache.rglob("*.so"))


def test_made_up_weights_are_named_so() -> None:
    made_up = fingerprint_of(MODEL, load_format="dummy", kernels="torch")
    assert (made_up.load_format, made_up.weights) == ("dummy", "dummy")


def test_a_memory_that_others_can_write_to_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    memory = DigestMemory(folder)
    memory.remember("id", "ab" * 16)
    assert memory.recall("id") == "ab" * 16 and memory.recall("other") == ""
    folder.chmod(0o777)
    assert memory.recall("id") == ""
    folder.chmod(0o700)
    (folder / "id").write_text("nonsense\n", encoding="ascii")
    assert memory.recall("id") == ""
    DigestMemory(Path("/proc/nowhere")).remember("id", "ab" * 16)


def test_an_identity_is_of_all_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    assert identity_of([one, two]) == identity_of([two, one]) != identity_of([one])


def test_text_parts_are_of_their_files(tmp_path: Path) -> None:
    wanted = text_fingerprint(shutil.copytree(MODEL, tmp_path / "same"))
    assert wanted == text_fingerprint(MODEL) and wanted.tokenizer
    changed = {
        "tokenizer.json": "tokenizer", "tokenizer_config.json": "tokenizer",
        "generation_config.json": "generation_config", "chat_template.jinja": "chat_template",
    }  # fmt: skip
    for file, part in changed.items():
        copy = Path(shutil.copytree(MODEL, tmp_path / file))
        (copy / file).write_text('{"other": 1}', encoding="utf-8")
        found = text_fingerprint(copy)
        assert getattr(found, part) != getattr(wanted, part), file
    assert text_fingerprint(tmp_path) == msgspec.structs.replace(text_fingerprint(tmp_path), tokenizer="")
