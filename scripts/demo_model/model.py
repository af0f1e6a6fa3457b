"""The architecture: a Llama with tied embeddings, its parameters named as in the checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoShape:
    """The architecture of one of the two models; widths in elements."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 4096
    context: int = 1024


SHAPES = {
    "target": DemoShape(hidden=256, layers=5, heads=8, kv_heads=4, head_dim=32, intermediate=704),
    "draft": DemoShape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=352),
}


class Attention(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [batch, time, hidden]
        b, t, _ = x.shape
        q, k, v = (
            proj(x).view(b, t, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = self.shape.heads // self.shape.kv_heads
        k, v = rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(b, t, -1))
        return projected


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [..., time, head_dim]
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Mlp(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dropout: float) -> Tensor:
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class Llama(nn.Module):
    """A Llama with tied embeddings whose parameter names are the checkpoint's."""

    cos: Tensor  # [context, head_dim]
    sin: Tensor

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        angles = torch.arange(shape.context)[:, None] / 10000 ** (torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * shape.layers) if residual else 1))

    def forward(self, ids: Tensor, dropout: float = 0.0) -> Tensor:  # ids [batch, time] -> logits [batch, time, vocab]
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = F.dropout(self.embed_tokens(ids), dropout, self.training)
        for layer in self.layers:
            x = layer(x, cos, sin, dropout)
        return F.linear(self.norm(x), self.embed_tokens.weight)
