"""Draft heads: whether the one that is asked for fits its model, and what a checkpoint brings to draft with."""

from __future__ import annotations

import math
from pathlib import Path

from engine.description.draft_head import HeadSpec, read_head
from engine.description.head_tensors import HeadTensors, check_tensors, map_head, plain_name
from engine.description.spec import ModelSpec
from services.cli.checks.models import CheckpointFacts, Finding, read_headers
from shared.config import Settings
from shared.errors import ModelError
from shared.text.model_source import find_model_dir, find_snapshot, why_no_directory


def check_head(settings: Settings, spec: ModelSpec) -> tuple[Finding, CheckpointFacts | None]:
    """Of the setting `draft`, which names a head, for this model; what it takes beside the model, where it is there."""
    draft, named = settings.speculation.draft, settings.speculation.head_directory
    model = _directory(settings.engine.model)
    directory = _directory(named) if named else model
    if directory is None or model is None:
        if wrong := why_no_directory(named or settings.engine.model):
            return Finding("wrong", "draft", f"draft={draft}: {wrong}"), None
        return Finding("note", "draft", f"{named} will be downloaded from the Hugging Face hub"), None
    try:
        head = read_head(draft, directory, model, spec)
        tensors = _checked(head, directory, spec)
    except ModelError as error:
        return Finding("wrong", "draft", f"draft={draft}: {error}"), None
    count = sum(math.prod(part.shape) for part in tensors.parts())
    what = f", which reads what enters layers {list(head.captures)}" if head.captures else ""
    finding = Finding("ok", "draft", f"{directory}: {head.title} head of {count / 1e6:.1f} M weights{what}")
    return finding, CheckpointFacts(head.layers, 0, count)


def check_brought(settings: Settings, spec: ModelSpec) -> Finding | None:
    """What a checkpoint brings to draft with that is not used; None: nothing."""
    directory = _directory(settings.engine.model)
    if directory is None or settings.engine.load_format == "dummy":
        return None
    try:
        head = read_head("mtp", directory, directory, spec)
        _checked(head, directory, spec)
    except ModelError:
        return None
    return Finding("note", "draft", "none; the checkpoint has a layer that drafts: --draft mtp")


def _checked(head: HeadSpec, directory: Path, spec: ModelSpec) -> HeadTensors:
    found = read_headers(directory)
    if not head.in_checkpoint:
        found = {plain_name(name): one for name, one in found.items()}
    tensors = map_head(head, spec, found.keys())
    check_tensors(head, tensors, spec, {name: (one.dtype, one.shape) for name, one in found.items()})
    return tensors


def _directory(name: str) -> Path | None:
    return find_model_dir(name) or find_snapshot(name)
