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

from engine.loading.load import load_runner
from engine.weights.digest import SMALL, DigestMemory, WeightDigest, identity_of
from kernels.cpu.binding import build
from kernels.cpu.binding.native import Native
from kernels.ops import digest
from kernels.ops.digest import Sums
from shared.config import Settings
from shared.messages.fingerprint import Fingerprint, difference
from shared.text.text_digest import text_fingerprint
from tests.kernels.cpu.natives import BUILDS, load_build

MODEL = Path(__file__).resolve().parents[3] / "models" / "pageant-stories-draft"
STRIPE = 256  # bytes that the native library takes at once
PIECE = digest.PIECE
SHAPES = (  # rows, bytes of a row
    (0, 8), (3, 0), (1, 1), (2, 63), (5, STRIPE - 1), (5, STRIPE), (5, STRIPE + 1), (700, 2048), (33, 3 * STRIPE + 77),
    (1, 1 << 20), (7, 2 * PIECE - 1), (7, 2 * PIECE), (7, 2 * PIECE + 1), (9, 6 * PIECE + 2),
)  # fmt: skip


def content(n: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(n + num_bytes).integers(0, 256, (n, num_bytes), dtype=np.uint8)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_sums_are_those_of_the_reference(name: str, shape: tuple[int, int]) -> None:
    rows = content(*shape)
    assert np.array_equal(load_build(name).row_sums(rows), digest.row_sums(rows))


def test_the_reference_is_what_its_formula_says() -> None:
    """In Python's own integers; the last piece of a row is filled up with zeros."""
    rows, wanted = content(3, 2 * PIECE + 25), [0] * digest.WORDS
    for index, row in enumerate(rows):
        content_of_row = row.tobytes() + bytes(2 * PIECE - 25)
        for piece in range(2):
            number, words = 2 * index + piece, content_of_row[2 * PIECE * piece :][: 2 * PIECE]
            values = [int.from_bytes(words[at : at + 2], "little", signed=True) for at in range(0, 2 * PIECE, 2)]
            keys = [as_signed(2 * mixed(at) + 1) for at in range(PIECE)]
            sum_ = sum(value * key for value, key in zip(values, keys, strict=True)) % 2**32
            wanted[number % 4] += sum_ * (splitmix(number) | 1)
    assert [int(sum_) for sum_ in digest.row_sums(rows)] == [sum_ % 2**64 for sum_ in wanted]


def mixed(at: int) -> int:
    x = (at * 23167 + 9377) % 2**15
    x = (x ^ x >> 7) * 19391 % 2**15
    return x ^ x >> 8


def test_no_two_keys_are_the_same() -> None:
    assert len(set(digest.KEYS.tolist())) == PIECE and (digest.KEYS % 2 == 1).all()


def splitmix(number: int) -> int:
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def as_signed(number: int) -> int:
    return number - 2**16 if number >= 2**15 else number


def test_every_bit_counts() -> None:
    rows = content(9, 3 * STRIPE + 40)
    before, flat = digest.row_sums(rows), rows.reshape(-1)
    for place in np.random.default_rng(1).integers(0, rows.size, 200):
        for flipped in (1, 128):
            flat[place] ^= flipped
            assert not np.array_equal(digest.row_sums(rows), before)
            flat[place] ^= flipped


def test_every_place_counts() -> None:
    """Exchanged words, stripes and rows, rows that differ in one bit, zeros that are somewhere else."""
    rows = content(6, 4 * STRIPE)
    rows[1] = rows[0]
    rows[1, -1] ^= 128
    zeros = np.zeros_like(rows)
    zeros[2, 512:520] = 1
    changed = [rows, zeros, np.roll(zeros, 8, 1), np.roll(zeros, STRIPE, 1), np.roll(zeros, 1, 0)]
    for words in (1, 8, 32):
        parts = rows.reshape(len(rows), -1, 8 * words)
        changed.append(np.concatenate([parts[:, 1:2], parts[:, :1], parts[:, 2:]], axis=1).reshape(rows.shape))
    changed += [rows[[1, 0, 2, 3, 4, 5]], rows[[0, 1, 3, 2, 4, 5]], rows[:5], -rows]
    assert len({digest.row_sums(np.ascontiguousarray(one)).tobytes() for one in changed}) == len(changed)


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


def test_small_tensors_are_hashed_as_they_are() -> None:
    """Those that are summed are told apart by one bit too, and sums are lent once, for all the names or none."""
    tensors = {"small": torch.zeros(SMALL, dtype=torch.uint8), "large": torch.zeros(SMALL + 1, dtype=torch.uint8)}
    found = {value(tensors), value(tensors, threads=2)}
    assert len(found) == 1
    for tensor in tensors.values():
        tensor[-1] = 1
        found.add(value(tensors))
    assert len(found) == 3
    made = WeightDigest()
    for name, tensor in tensors.items():
        made.add(name, tensor)
    assert all(made.sums(*names) is None for names in (["small"], ["large", "small"], ["large", "large"]))
    sums = made.sums("large")
    assert sums is not None
    sums += digest.row_sums(tensors["large"].numpy()[None])
    assert made.sums("large") is None and made.value in found


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
