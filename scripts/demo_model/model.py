"""The two architectures, as transformers has them, with dropout for training."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from scripts.bench.common.specs import llama

OWN: dict[str, Any] = {
    "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SHAPES = {"target": llama(256, 704, 5, (8, 4), 4096, **OWN), "draft": llama(128, 352, 2, (4, 2), 4096, **OWN)}


def make_model(size: str, dropout: float = 0.0) -> Any:
    """With random weights, those that write to the residual stream smaller the more layers there are."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[size]))
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data /= math.sqrt(2 * SHAPES[size]["num_hidden_layers"])

    def drop(module: nn.Module, arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # attention's: its output and its weights
            return (drop(module, arguments, output[0]), *output[1:])
        return F.dropout(output, dropout, module.training)

    for module in model.modules():
        if isinstance(module, (LlamaAttention, LlamaMLP, nn.Embedding)):
            module.register_forward_hook(drop)
    return model
