"""A checkpoint's config.json as a description, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.description.families import FAMILIES, Family
from engine.description.keys import ConfigKeys, read_object
from engine.description.labels import CLASSIFIES, GENERATES, read_labels
from engine.description.names import TensorMap
from engine.description.spec import ModelSpec
from engine.description.tensors import map_tensors
from shared.errors import ModelError


def read_config(directory: Path) -> ModelSpec:
    """The description in `directory`.  Raises ModelError naming the file and key."""
    path = directory / "config.json"
    content = read_object(path)
    try:
        return parse_config(content)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def why_no_draft(name: str) -> str:
    """A draft's model takes tokens back that were not accepted, and states cannot be taken back."""
    return f"draft {name!r} has linear attention, whose states cannot take tokens back; use another, or draft=ngram"


def parse_config(raw: Mapping[str, Any]) -> ModelSpec:
    """A config.json's content, checked.  Raises ModelError naming the key."""
    architecture, family = _family(raw)
    if str(raw["architectures"][0]).endswith(CLASSIFIES):
        return replace(family.describe(ConfigKeys(raw)), tie_word_embeddings=True, **read_labels(raw))
    if not family.text_of:
        return family.describe(ConfigKeys(raw))
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError("text_config is missing or not an object")
    common = {key: raw[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in raw}
    return replace(family.describe(ConfigKeys({**common, **text})), architecture=architecture)


def tensors_of(spec: ModelSpec, found: Collection[str] | None = None) -> TensorMap:
    """The tensors under the spelling that fits best what a checkpoint has; without one the family's first."""
    maps = [map_tensors(spec, table) for table in FAMILIES[spec.architecture].names]
    if found is None or len(maps) == 1:
        return maps[0]
    return min(maps, key=lambda one: len(one.shapes().keys() - set(found)))


def _family(raw: Mapping[str, Any]) -> tuple[str, Family]:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("architectures is missing or empty")
    name = str(names[0])
    base = name.removesuffix(CLASSIFIES) + GENERATES if name.endswith(CLASSIFIES) else name
    if base not in FAMILIES:
        raise ModelError(f"architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    return base, FAMILIES[base]
