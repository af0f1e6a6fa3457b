"""An adapter's tensors are those that safetensors reads, and what is no such file is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.lora.content import AdapterContent, read_content
from shared.errors import ModelError

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
NAME = "adapter_model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def written(header: object, values: bytes, *, behind: int = 0) -> bytes:
    """A file with a header and so many spaces behind it."""
    text = json.dumps(header).encode() + b" " * behind
    return len(text).to_bytes(8, "little") + text + values


def refused(directory: Path, content: bytes) -> str:
    (directory / NAME).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_content(directory)
    return str(caught.value)


def equal(found: AdapterContent, wanted: dict[str, Tensor]) -> bool:
    pairs = ((found.tensors[name], tensor) for name, tensor in wanted.items())
    return found.tensors.keys() == wanted.keys() and all(
        one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs
    )


def test_tensors_are_those_that_the_library_reads(directory: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{dtype}.{shape}": torch.randn(shape, generator=generator).mul(50).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8)
        for shape in ((3, 5), (1, 7), (2, 0), (4,), ())
    }
    save_file(tensors, directory / NAME, metadata={"format": "pt"})
    assert equal(read_content(directory), load_file(directory / NAME))


@pytest.mark.parametrize("behind", range(4))
def test_values_may_lie_anywhere(directory: Path, behind: int) -> None:
    values = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    header = {"x": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    content = written(header, values.view(torch.uint8).numpy().tobytes(), behind=behind)
    (directory / NAME).write_bytes(content)
    assert equal(read_content(directory), {"x": values})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_the_tensor_whose_values_are_not_finite_is_named(
    directory: Path, dtype: torch.dtype, value: float, other: torch.dtype
) -> None:
    tensors = {name: torch.ones(40, 33, dtype=dtype) for name in "abc"} | {"d": torch.ones(2, 2, dtype=other)}
    tensors["b"][39, 17] = value
    save_file(tensors, directory / NAME)
    with pytest.raises(ModelError, match="b has values that are not finite"):
        read_content(directory)


def test_the_largest_values_are_finite(directory: Path) -> None:
    tensors = {"a": torch.full((9, 9), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)}
    save_file(tensors, directory / NAME)
    assert equal(read_content(directory), tensors)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 10]}, "is not at"),
        ({"dtype": "BF16", "shape": [2, 3], "data_offsets": [12, 24]}, "is not at"),
        ({"dtype": "BF16", "shape": [2, 3], "data_offsets": [12, 0]}, "is not at"),
        ({"dtype": "BF16", "shape": [2, -3], "data_offsets": [0, 12]}, "shape"),
        ({"dtype": "BF16", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 12]}, "is not at"),
        ({"dtype": "BF16", "shape": [2, 3], "data_offsets": [-12, 0]}, "data_offsets"),
        ({"dtype": "BF16", "shape": "2, 3", "data_offsets": [0, 12]}, "shape"),
        ({"dtype": "BF16", "shape": [2, 3]}, "data_offsets"),
        ({"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}, "dtype F4"),
        (7, "object"),
    ],
)
def test_a_tensor_that_is_not_in_the_file_is_refused(directory: Path, stored: object, message: str) -> None:
    said = refused(directory, written({"x": stored}, bytes(12)))
    assert said.startswith(f"{NAME} cannot be read: ")
    assert message in said


def test_what_is_no_such_file_is_refused(directory: Path) -> None:
    whole = written({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, bytes(4))
    for content in (b"", b"\0" * 7, whole[:20], (1 << 60).to_bytes(8, "little") + b"{}", written([], b"")):
        assert refused(directory, content).startswith(f"{NAME} cannot be read: ")
    assert refused(directory, whole.replace(b'"x"', b'"\xff"')).startswith(f"{NAME} cannot be read: ")


def test_what_lies_too_deep_is_refused(directory: Path) -> None:
    deep = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert "recursion" in refused(directory, len(deep).to_bytes(8, "little") + deep)
    (directory / "adapter_config.json").write_bytes(deep)
    assert refused(directory, b"").startswith("adapter_config.json cannot be read: ")
