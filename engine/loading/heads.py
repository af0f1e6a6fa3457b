"""The draft head that the settings name, beside the model that it drafts for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog
from torch import Tensor

from engine.description.draft_head import HeadSpec, read_head
from engine.description.spec import ModelSpec
from engine.heads.build import build_native_head, build_torch_head
from engine.heads.model import HeadModel
from engine.heads.source import HeadSource
from engine.loading.backend import Backend
from engine.modeling.model import Model
from engine.modeling.native.decoder import NativeDecoder
from engine.modeling.torch_decoder.decoder import Decoder
from engine.weights.source import open_weights
from shared.config import Settings
from shared.errors import ConfigError, ModelError
from shared.text.model_source import resolve_model_dir

log = structlog.get_logger()


class FoundHead(msgspec.Struct, frozen=True):
    """A head whose files were checked; its tensors are not read yet."""

    spec: HeadSpec
    source: HeadSource
    ids: Tensor | None


def find_head(settings: Settings, directory: Path, target: ModelSpec) -> FoundHead | None:
    """None where the settings name no head.  Raises ModelError for one that does not fit the model."""
    speculation = settings.speculation
    if not speculation.has_head:
        return None
    own = directory if speculation.draft == "mtp" else resolve_model_dir(speculation.head_directory)
    if settings.engine.load_format == "dummy":
        raise ConfigError(f"draft={speculation.draft} reads what a model has learnt; load_format is dummy")
    try:
        spec = read_head(speculation.draft, own, directory, target)
        source = HeadSource(own, spec, target)
        return FoundHead(spec, source, source.ids(spec, target))
    except ModelError as error:
        raise ModelError(f"draft={speculation.draft}: {error}") from error


def build_head(
    settings: Settings, found: FoundHead, directory: Path, model: Model, backend: Backend, max_positions: int
) -> HeadModel:
    source = found.source
    embedding = _embedding(settings, found, directory, model)
    sizes = {"kind": found.spec.title, "num_weights": source.num_elements}
    if isinstance(model, NativeDecoder) and backend.native is not None:
        head = build_native_head(
            found.spec,
            source,
            model,
            embedding,
            found.ids,
            formats=backend.formats,
            native=backend.native,
            max_positions=max_positions,
        )
    elif isinstance(model, Decoder):
        head = build_torch_head(
            found.spec,
            source,
            model,
            embedding,
            found.ids,
            formats=backend.formats,
            kernels=backend.kernels,
            max_positions=max_positions,
        )
    else:
        raise ConfigError(f"draft={settings.speculation.draft}: {type(model).__name__} shows no hidden states")
    log.info("draft_head_loaded", draft=settings.speculation.draft, **sizes)
    return head


def _embedding(settings: Settings, found: FoundHead, directory: Path, model: Model) -> Tensor:
    """As it is stored, in the mapped file: a head reads a few rows of it in each step."""
    if found.source.head.own_embedding:
        return found.source.take(found.source.tensors.embedding).to(model.device)
    weights = open_weights(settings.engine.load_format, directory, model.spec, progress=_Silence)
    return weights.take(weights.tensors.embedding).to(model.device)


class _Silence:
    """No bar for one tensor."""

    def __init__(self, total: int) -> None: ...

    def update(self) -> None: ...

    def close(self) -> None: ...
