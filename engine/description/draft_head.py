"""Draft heads as data: small layers that read what the target computed of a token, and draft what follows the next one.

Position i of a head reads the embedding of token i + 1 and a vector of token i: hidden states of the target, or, where
it goes on alone, what the head itself made of the position before.  Its keys and values of position i lie at slot i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.description.families import FAMILIES, llama
from engine.description.keys import ConfigKeys, read_object
from engine.description.spec import AttentionSpec, LayerSpec, ModelSpec
from shared.errors import ModelError

LAYERS = {"llama": llama.llama, "qwen3": llama.qwen3}  # by model_type: of what a head's layers are


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """What a head computes of an embedding e and a vector h, both normed where it says so:

    beside:  h goes through the layer, whose attention reads e and h behind each other in the place of its normed input
    else:    a linear of both, `combine`, goes through the layers
    """

    title: str
    layers: ModelSpec  # as a decoder's own: its vocabulary is what is drafted from
    target_hidden: int
    captures: tuple[int, ...] = ()  # layers of the target whose inputs it reads; empty: its final hidden states
    capture_norm: Literal["", "whole", "each"] = ""  # of these, behind each other
    fused: bool = False  # a linear makes h of them
    beside: bool = False
    embedding_norm: bool = False
    hidden_norm: bool = False
    norms_residual: bool = False  # what goes through the layer is h behind its norm
    final_norm: bool = False
    feeds_normed: bool = False  # the next position reads what is behind the final norm
    skips_first: bool = False  # the embedding that position 0 reads is zero
    in_checkpoint: bool = False  # its tensors are in the target's files

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def captured_size(self) -> int:
        """Features of the target that it reads of a token."""
        return self.target_hidden * (len(self.captures) or 1)


def read_head(draft: str, directory: Path, target_directory: Path, target: ModelSpec) -> HeadSpec:
    """The head that the setting `draft` names, in `directory`; `mtp` is in the target's own.  Raises ModelError."""
    if draft == "mtp":
        raw = read_object(target_directory / "config.json")
        text = raw.get("text_config")
        return describe_mtp(target, text if isinstance(text, Mapping) else raw)
    path = directory / "config.json"
    try:
        return describe_eagle(read_object(path), target)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


# -- EAGLE


def describe_eagle(raw: Mapping[str, Any], target: ModelSpec) -> HeadSpec:
    """Of a head's config.json: as EAGLE's authors and SGLang write it, or as speculators does."""
    kind = raw.get("speculators_model_type")
    layer = raw.get("transformer_layer_config") if kind else raw
    if kind not in (None, "eagle", "eagle3") or not isinstance(layer, Mapping):
        raise ModelError(f"speculators_model_type {kind!r} is not supported; supported: eagle, eagle3")
    is_third = kind == "eagle3" or (kind is None and _is_third(raw))
    spec = _eagle3(raw, layer, target) if is_third else _eagle(raw, layer, target)
    if not is_third and spec.hidden_size != target.hidden_size:
        raise ModelError(f"hidden_size is {spec.hidden_size}; the model's is {target.hidden_size}")
    vocab = layer.get("vocab_size")
    if vocab is not None and vocab != target.vocab_size and not (is_third and vocab == spec.layers.vocab_size):
        raise ModelError(f"vocab_size is {vocab}; the model's is {target.vocab_size}")
    return spec


def _is_third(raw: Mapping[str, Any]) -> bool:
    names = " ".join(map(str, raw.get("architectures") or []))
    return "draft_vocab_size" in raw or "eagle3" in names.lower()


def _layers(layer: Mapping[str, Any], **changes: Any) -> ModelSpec:
    kind = layer.get("model_type") or "llama"
    if kind not in LAYERS:
        raise ModelError(f"model_type {kind!r} of a draft head is not supported; supported: {', '.join(LAYERS)}")
    # What heads say of their longest position limits nothing: they stand where the model's layers stand.
    return LAYERS[kind](ConfigKeys({"max_position_embeddings": 2048, **layer, "layer_types": None, **changes}))


def _eagle(raw: Mapping[str, Any], layer: Mapping[str, Any], target: ModelSpec) -> HeadSpec:
    if raw.get("layernorms"):
        raise ModelError("layernorms is not supported: EAGLE-1 with norms of its own")
    found = _layers({**layer, "vocab_size": target.vocab_size, "tie_word_embeddings": False})
    first = replace(found.layers[0], input_norm=False)
    return HeadSpec(
        title="EAGLE-1",
        layers=replace(found, layers=(first, *found.layers[1:])),
        target_hidden=target.hidden_size,
    )


def _eagle3(raw: Mapping[str, Any], layer: Mapping[str, Any], target: ModelSpec) -> HeadSpec:
    given = raw.get("eagle_config")
    options = {**(given if isinstance(given, Mapping) else {}), **raw}
    keys = ConfigKeys(options)
    if (count := layer.get("num_hidden_layers", 1)) != 1:
        raise ModelError(f"num_hidden_layers is {count}; an EAGLE-3 head with 1 is supported")
    vocab = keys.positive_int("draft_vocab_size", target.vocab_size)
    if vocab > target.vocab_size:
        raise ModelError(f"draft_vocab_size is {vocab}; the model has {target.vocab_size} tokens")
    found = _layers(layer, vocab_size=vocab, num_hidden_layers=1, tie_word_embeddings=False)
    stated = keys.positive_int("target_hidden_size", target.hidden_size)
    if stated != target.hidden_size:
        raise ModelError(f"target_hidden_size is {stated}; the model's hidden_size is {target.hidden_size}")
    norms = [name for name in ("norm_before_fc", "fc_norm") if keys.flag(name)]
    if len(norms) > 1:
        raise ModelError("norm_before_fc and fc_norm are both true")
    return HeadSpec(
        title="EAGLE-3",
        layers=replace(found, layers=(replace(found.layers[0], input_norm=False),)),
        target_hidden=target.hidden_size,
        captures=_captures(raw, given, target),
        capture_norm="" if not norms else "whole" if norms == ["norm_before_fc"] else "each",
        fused=True,
        beside=True,
        embedding_norm=True,
        hidden_norm=True,
        norms_residual=keys.flag("norm_before_residual"),
        final_norm=True,
        feeds_normed=keys.flag("norm_output"),
    )


def _captures(raw: Mapping[str, Any], given: Any, target: ModelSpec) -> tuple[int, ...]:
    """At the top level ids are of the layers that a state enters; in `eagle_config`, of those that it leaves."""
    name, count = "eagle_aux_hidden_state_layer_ids", target.num_layers
    ids = ConfigKeys(raw).integers(name)
    if not ids and isinstance(given, Mapping):
        ids = [one + 1 for one in ConfigKeys(given).integers(name)]
    if not ids:
        ids = [2, count // 2, count - 3]
    if sorted(set(ids)) != list(ids) or not 0 <= ids[0] <= ids[-1] < count:
        raise ModelError(f"{name}: a head must read the inputs of ascending layers in 0..{count - 1}, got {ids}")
    return tuple(ids)


# -- MTP


def describe_mtp(target: ModelSpec, raw: Mapping[str, Any]) -> HeadSpec:
    """The layer behind a model's own that its checkpoint has to draft with.  Raises ModelError where there is none."""
    names = FAMILIES[target.architecture].mtp
    if names is None:
        raise ModelError(f"{target.architecture} has no layer to draft with")
    count = ConfigKeys(raw).count(names.count_key, 1)
    if not count:
        raise ModelError(f"{names.count_key} is 0: this checkpoint has no layer to draft with")
    layer = _last_with_cache(target.layers)
    return HeadSpec(
        title="MTP",
        layers=replace(target, layers=(layer,), unused_layers=0),
        target_hidden=target.hidden_size,
        embedding_norm=True,
        hidden_norm=True,
        final_norm=True,
        feeds_normed=names.feeds_normed,
        skips_first=names.skips_first,
        in_checkpoint=True,
    )


def _last_with_cache(layers: tuple[LayerSpec, ...]) -> LayerSpec:
    return next(layer for layer in reversed(layers) if isinstance(layer.attention, AttentionSpec))
