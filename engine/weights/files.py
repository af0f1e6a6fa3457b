"""The safetensors files of a checkpoint: which there are, and which tensors each has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.weights.inventory import listing
from shared.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_file(path: Path) -> Any:
    """Imported here: made-up weights need no files, and so no library to read them."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def tensor_files(directory: Path) -> dict[str, list[str]]:
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
            raise ModelError(f"{directory / file} lacks {listing(missing)}, which {INDEX_FILE} says it holds")
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
    return list(open_file(path).keys())
