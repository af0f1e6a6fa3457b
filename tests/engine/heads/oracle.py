"""Small random draft heads on disk, and what they draft by plain torch: whole sequences at once, without a cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

Tensors = dict[str, Tensor]
HEADS, KV_HEADS, DIMS, INNER, THETA, EPS = 2, 1, 32, 48, 500.0, 1e-5


def draw(generator: torch.Generator, *shape: int, spread: float = 0.2) -> Tensor:
    if len(shape) == 1:
        return 1.0 + 0.2 * torch.randn(shape, generator=generator)
    return spread * torch.randn(shape, generator=generator)


def layer_config(hidden: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIMS,
        "intermediate_size": INNER,
        "rope_theta": THETA,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
    }


def _layer(generator: torch.Generator, hidden: int, read: int) -> Tensors:
    shapes = {
        "self_attn.q_proj": (HEADS * DIMS, read),
        "self_attn.k_proj": (KV_HEADS * DIMS, read),
        "self_attn.v_proj": (KV_HEADS * DIMS, read),
        "self_attn.o_proj": (hidden, HEADS * DIMS),
        "mlp.gate_proj": (INNER, hidden),
        "mlp.up_proj": (INNER, hidden),
        "mlp.down_proj": (hidden, INNER),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{name}.weight": draw(generator, *shape) for name, shape in shapes.items()}


def write_head(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def write_eagle1(directory: Path, hidden: int, vocab: int, *, seed: int = 0) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layers.0.{name}": tensor for name, tensor in _layer(generator, hidden, hidden).items()}
    tensors |= {
        "fc.weight": draw(generator, hidden, 2 * hidden),
        "fc.bias": draw(generator, hidden) - 1.0,
        "embed_tokens.weight": draw(generator, vocab, hidden),
    }
    return write_head(directory, {"architectures": ["LlamaForCausalLM"], **layer_config(hidden, vocab)}, tensors)


def write_eagle3(
    directory: Path,
    hidden: int,
    vocab: int,
    captures: Sequence[int],
    *,
    drafted: int = 0,  # tokens that may be drafted; 0: all
    prefix: str = "midlayer.",
    as_speculators: bool = False,
    seed: int = 0,
    **options: Any,
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    layer = _layer(generator, hidden, 2 * hidden)
    layer |= {f"{name}.weight": draw(generator, hidden) for name in ("input_layernorm", "hidden_norm")}
    tensors = {prefix + name: tensor for name, tensor in layer.items()}
    tensors |= {
        "fc.weight": draw(generator, hidden, len(captures) * hidden),
        "norm.weight": draw(generator, hidden),
        "lm_head.weight": draw(generator, drafted or vocab, hidden),
    }
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = draw(generator, len(captures) * hidden)
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": draw(generator, hidden) for index in range(len(captures))}
    if drafted:
        kept = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        tensors["d2t"] = kept - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    head = {"draft_vocab_size": drafted or vocab, "eagle_aux_hidden_state_layer_ids": list(captures), **options}
    config = {"architectures": ["LlamaForCausalLMEagle3"], **layer_config(hidden, vocab), **head}
    if as_speculators:
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer_config(hidden, vocab), **head}
    return write_head(directory, config, tensors)


# -- what they draft


@dataclass
class Around:
    """A head as functions of whole sequences."""

    read: Callable[[list[Tensor], Tensor], Tensor]  # states that enter the layers, final ones -> what positions read
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # token ids behind, hidden -> logits, what is fed back
    ids: Tensor | None = None


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _turn(x: Tensor) -> Tensor:  # [num_heads, n, dims]
    angles = torch.outer(torch.arange(x.shape[1]).float(), THETA ** -(torch.arange(0, DIMS, 2).float() / DIMS))
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def llama_layer(tensors: Tensors, residual: Tensor, read: Tensor) -> Tensor:  # [n, hidden] each
    def heads(name: str) -> Tensor:
        found = linear(read, tensors[f"self_attn.{name}.weight"])
        return found.view(len(read), -1, DIMS).transpose(0, 1)

    query, key, value = _turn(heads("q_proj")), _turn(heads("k_proj")), heads("v_proj")
    key, value = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (key, value))
    mixed = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)
    residual = residual + linear(mixed, tensors["self_attn.o_proj.weight"])
    x = norm(residual, tensors["post_attention_layernorm.weight"])
    inner = silu(linear(x, tensors["mlp.gate_proj.weight"])) * linear(x, tensors["mlp.up_proj.weight"])
    return residual + linear(inner, tensors["mlp.down_proj.weight"])


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def eagle1_oracle(directory: Path, lm_head: Tensor) -> Around:
    tensors = load_file(directory / "model.safetensors")
    layer = _part(tensors, "layers.0.")

    def step(behind: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((embedding(behind, tensors["embed_tokens.weight"]), hidden), -1)
        x = linear(both, tensors["fc.weight"], tensors["fc.bias"])
        state = llama_layer(layer, x, x)
        return linear(state, lm_head), state

    return Around(lambda _, final: final, step)


def eagle3_oracle(directory: Path, embed: Tensor, captures: Sequence[int], **options: Any) -> Around:
    tensors = load_file(directory / "model.safetensors")
    layer = _part(tensors, "midlayer.") or _part(tensors, "layers.0.")

    def read(entering: list[Tensor], final: Tensor) -> Tensor:
        states = [entering[index] for index in captures]
        if options.get("fc_norm"):
            states = [norm(one, tensors[f"fc_norm.{index}.weight"]) for index, one in enumerate(states)]
        both = torch.cat(states, -1)
        if options.get("norm_before_fc"):
            both = norm(both, tensors["input_norm.weight"])
        return linear(both, tensors["fc.weight"])

    def step(behind: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        e, h = (
            norm(embedding(behind, embed), layer["input_layernorm.weight"]),
            norm(hidden, layer["hidden_norm.weight"]),
        )
        residual = h if options.get("norm_before_residual") else hidden
        state = llama_layer(layer, residual, torch.cat((e, h), -1))
        normed = norm(state, tensors["norm.weight"])
        return linear(normed, tensors["lm_head.weight"]), normed if options.get("norm_output") else state

    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"] if "d2t" in tensors else None
    return Around(read, step, ids)


@torch.inference_mode()
def drafted(model: Any, head: Around, token_ids: Sequence[int], count: int) -> list[int]:
    """What the head drafts behind these tokens, the last of which the model has not computed."""
    ids = torch.tensor(token_ids)
    states = model(ids[None, :-1], output_hidden_states=True).hidden_states
    hidden = head.read([one[0] for one in states[:-1]], states[-1][0])
    behind, found = ids[1:], []
    for _ in range(count):
        logits, fed = head.step(behind, hidden)
        token = logits[-1].argmax()
        token = token if head.ids is None else head.ids[token]
        found.append(int(token))
        behind, hidden = torch.cat((behind, token[None])), torch.cat((hidden, fed[-1:]))
    return found
