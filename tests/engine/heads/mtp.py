"""Checkpoints with an MTP layer: transformers' model of one layer more, whose last layer is stored as the MTP layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding, linear

from tests.engine.checkpoints import HYBRID_VARIANTS, VARIANTS, save_checkpoint
from tests.engine.heads.oracle import EPS, Around, draw, norm

FULL = "full_attention"


def write_mtp(directory: Path, variant: str, kernels: str, **changes: Any) -> tuple[Any, Around]:
    """With these changes of the configuration.  Returns transformers' model, and the head."""
    described = (VARIANTS | HYBRID_VARIANTS)[variant][1]
    kinds = described.get("layer_types")
    count = described.get("num_hidden_layers", 3)
    further: dict[str, Any] = {"num_hidden_layers": count + 1, "mlp_only_layers": [0], **changes}
    further["layer_types"] = [*kinds, FULL] if kinds else None
    whole = save_checkpoint(directory, variant, kernels, further)
    behind = whole.model.layers.pop(count)
    is_hybrid = kinds is not None
    file, hidden = directory / "model.safetensors", whole.config.hidden_size
    stored = load_file(file)
    last, place = f"model.layers.{count}.", "mtp.layers.0." if is_hybrid else f"model.layers.{count}."
    stored = {name.replace(last, place): one for name, one in stored.items()}
    generator = torch.Generator().manual_seed(3)
    around = {slot: draw(generator, hidden) for slot in ("embedding", "hidden", "final")}
    combine = draw(generator, hidden, 2 * hidden)
    names = (
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
        if is_hybrid
        else tuple(last + name for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj"))
    )
    for name, one in zip(names, (*around.values(), combine), strict=True):
        stored[f"{name}.weight"] = one - 1.0 if is_hybrid and one.dim() == 1 else one
    save_file({name: one.contiguous() for name, one in stored.items()}, file)
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": count, "layer_types": kinds, "num_nextn_predict_layers": 1}
    if kinds is None:
        del config["layer_types"]
    (directory / "config.json").write_text(json.dumps(config))
    whole.config.num_hidden_layers = count
    embed, head = whole.model.embed_tokens.weight, whole.lm_head.weight

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        e = embedding(tokens, embed)
        if not is_hybrid:
            e[0] = 0.0
        both = torch.cat((norm(e, around["embedding"], EPS), norm(states, around["hidden"], EPS)), -1)
        state = _through(whole.model, behind, linear(both, combine))
        normed = norm(state, around["final"], EPS)
        return linear(normed, head), normed if is_hybrid else state

    return whole, Around(lambda _, final: final, step)


def _through(model: Any, layer: Any, x: Tensor) -> Tensor:
    positions = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
    rotation = model.rotary_emb(x[None], positions)
    found = layer(x[None], position_embeddings=rotation, attention_mask=mask, position_ids=positions)
    result: Tensor = found[0] if isinstance(found, tuple) else found
    return result.view(len(x), -1)
