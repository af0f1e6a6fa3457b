"""Checkpoint tensors: from safetensors files, or made up from the configuration alone.

Every name and shape is checked against the configuration before the first tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from shared.errors import ModelError
from shared.modeling.config import ModelConfig
from shared.modeling.tensors import EMBEDDING, HEAD, IGNORED_SUFFIXES, Shape, expected_tensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAMED_AT_MOST = 5  # tensors in one error message

Named = tuple[str, Tensor]
Progress = Callable[[Iterable[Named], int], Iterable[Named]]  # tensors and their number -> the same, counted


def terminal_progress(tensors: Iterable[Named], total: int) -> Iterable[Named]:
    """A bar on standard error where that is a terminal, nothing otherwise."""
    return tqdm(tensors, total=total, desc="loading weights", unit="tensor", disable=None)


def load_weights(
    directory: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> dict[str, Tensor]:
    """All tensors of `expected_tensors`.  Raises ModelError naming the file, tensor and shapes."""
    files = _tensor_files(directory)
    expected = _check_names(directory, config, {name for names in files.values() for name in names})
    tensors = _read_files(directory, files, expected)
    # Files are mapped into memory: a tensor is read when it is converted, here, so the bar shows the reading.
    weights = {
        name: tensor.to(device=device, dtype=dtype)
        for name, tensor in (progress or terminal_progress)(tensors, len(expected))
    }
    if config.tie_word_embeddings:
        head = weights.pop(HEAD, None)
        weights.setdefault(EMBEDDING, head) if head is not None else None
    return weights


def make_weights(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Random weights, the same for the same configuration and seed: norms are one, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 2:
            tensor = torch.randn(shape, generator=generator) * config.initializer_range
        else:
            tensor = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        weights[name] = tensor.to(device=device, dtype=dtype)
    return weights


def _tensor_files(directory: Path) -> dict[str, list[str]]:
    """The tensor names in each file, by file name."""
    if (directory / SINGLE_FILE).is_file():
        return {SINGLE_FILE: _read_names(directory / SINGLE_FILE)}
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ModelError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    files: dict[str, list[str]] = {}
    for name, file in _read_index(index).items():
        if Path(file).name != file:
            raise ModelError(f"{index}: weight_map sends {name} to {file!r}, outside the checkpoint's directory")
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        missing = sorted(set(names) - set(_read_names(directory / file)))
        if missing:
            raise ModelError(f"{directory / file} lacks {_listing(missing)}, which {INDEX_FILE} says it holds")
    return files


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{path} has no weight_map from tensor names to file names")
    return weight_map


def _read_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _check_names(directory: Path, config: ModelConfig, found: set[str]) -> dict[str, Shape]:
    """The tensors to read and their shapes."""
    expected = expected_tensors(config)
    if config.tie_word_embeddings and HEAD in found:
        shape = expected[EMBEDDING]
        if EMBEDDING not in found:
            del expected[EMBEDDING]
        expected[HEAD] = shape
    missing = sorted(expected.keys() - found)
    if missing:
        raise ModelError(
            f"{directory} lacks {_listing(missing)} of the {len(expected)} tensors of {config.architecture}"
        )
    extra = sorted(name for name in found - expected.keys() if not name.endswith(IGNORED_SUFFIXES))
    if extra:
        raise ModelError(
            f"{directory} has {_listing(extra)}, which {config.architecture} with this config.json has not"
        )
    return expected


def _read_files(directory: Path, files: Mapping[str, list[str]], expected: Mapping[str, Shape]) -> Iterator[Named]:
    for name, names in files.items():
        yield from _read_file(directory / name, [name for name in names if name in expected], expected)


def _read_file(path: Path, names: list[str], expected: Mapping[str, Shape]) -> Iterator[Named]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in names:
                _check_shape(path, name, tuple(file.get_slice(name).get_shape()), expected[name])
                yield name, _floating(path, name, file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _check_shape(path: Path, name: str, found: Shape, expected: Shape) -> None:
    if found != expected:
        raise ModelError(f"{path}: tensor {name} has shape {list(found)}, expected {list(expected)}")


def _floating(path: Path, name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise ModelError(f"{path}: tensor {name} has dtype {tensor.dtype}, expected a floating-point one")
    return tensor


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED_AT_MOST])
    rest = len(names) - NAMED_AT_MOST
    return f"{shown} and {rest} more" if rest > 0 else shown
