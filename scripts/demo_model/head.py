"""Trains an EAGLE-3 head for the bundled model, on text that the model itself writes.

A head is trained as it drafts: of several positions in turn, where from the second on it reads what it made itself of
the position before (Li et al., 2025).  What it should draft is the model's own distribution.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaForCausalLM

from engine.loading.load import load_model
from engine.modeling.batch import StepBatch
from engine.modeling.model import Extends
from scripts.demo_model.training import optimizers
from shared.config import Settings

CAPTURES = (1, 3, 4)  # layers whose inputs the head reads
DRAFTED = 2048  # tokens that it can draft: those that the model writes most
INNER = 384
HEADS, KV_HEADS, DIMS = 8, 4, 32
TURNS = 4  # positions that it drafts one after the other in training
LENGTH = 192  # tokens of a text
TOGETHER = 256  # texts that are written at once
BLOCK = 16
DIVERSE = 12  # first tokens, which are drawn as they are likely
SUBJECTS = (
    "dog",
    "cat",
    "bird",
    "girl",
    "boy",
    "frog",
    "bear",
    "fish",
    "duck",
    "train",
    "ball",
    "tree",
    "king",
    "boat",
)


@torch.inference_mode()
def write_texts(directory: Path, tokenizer: Tokenizer, count: int) -> Tensor:  # [count, LENGTH] int64
    """Half of them greedy, since that is what many requests ask for; a third answer an instruction."""
    blocks = -(-LENGTH // BLOCK)
    settings = Settings.of(
        model=str(directory), num_blocks=TOGETHER * blocks, block_size=BLOCK, max_num_seqs=TOGETHER, kernels="native"
    )
    loaded = load_model(settings, longest=blocks * BLOCK)
    tables = np.arange(TOGETHER * blocks).reshape(TOGETHER, blocks)
    rows, found = np.arange(TOGETHER), []
    for turn in tqdm(range(-(-count // TOGETHER)), desc="writing", disable=None):
        start = [0]
        if turn % 3 == 0:
            subject = SUBJECTS[turn // 3 % len(SUBJECTS)]
            start = tokenizer.encode(f"<|user|>Tell me a story about a {subject}.<|end|><|assistant|>").ids
        tokens = torch.zeros(TOGETHER, blocks * BLOCK, dtype=torch.int64)
        tokens[:, : len(start)] = torch.tensor(start)
        ones, computed, given = np.ones_like(rows), np.zeros_like(rows), len(start)
        for upto, warmth in ((given + DIVERSE, 1.0), (LENGTH, 0.7 * (turn % 2))):
            batch = StepBatch(rows, computed, given * ones, ones, tokens, tables, BLOCK)
            assert isinstance(loaded.model, Extends)
            loaded.model.extend(
                batch, upto - int(computed[0]) - given, np.full(TOGETHER, warmth), rows + turn * TOGETHER
            )
            computed, given = (upto - 1) * ones, 1
        found.append(tokens[:, :LENGTH])
    return torch.cat(found)[:count]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def turned(x: Tensor, positions: Tensor) -> Tensor:  # [batch, heads, n, DIMS]
    angles = torch.outer(positions.float(), 10000.0 ** -(torch.arange(0, DIMS, 2).float() / DIMS))
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Head(nn.Module):
    """Names and shapes are those of a checkpoint."""

    def __init__(self, target: Any, kept: Tensor) -> None:
        super().__init__()
        hidden = target.config.hidden_size
        shapes = {
            "fc": (hidden, len(CAPTURES) * hidden),
            "q_proj": (HEADS * DIMS, 2 * hidden),
            "k_proj": (KV_HEADS * DIMS, 2 * hidden),
            "v_proj": (KV_HEADS * DIMS, 2 * hidden),
            "o_proj": (hidden, HEADS * DIMS),
            "gate_proj": (INNER, hidden),
            "up_proj": (INNER, hidden),
            "down_proj": (hidden, INNER),
        }
        made = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
        made["fc"][:, -hidden:] += torch.eye(hidden)
        made["o_proj"] *= 0.5
        made["down_proj"] *= 0.5
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        made |= {name: torch.ones(hidden) for name in names}
        made["norm"] = target.model.norm.weight.detach().clone()
        made["lm_head"] = target.model.embed_tokens.weight.detach()[kept].clone()
        self.weights = nn.ParameterDict(made)

    def forward(
        self,
        behind: Tensor,  # [batch, n, hidden] embeddings of the next tokens
        states: Tensor,  # [batch, n, hidden] what positions read
        keys: list[tuple[Tensor, Tensor]],  # keys and values of the turns before; those of this one are added
    ) -> Tensor:  # [batch, n, hidden]
        w, turn, n = self.weights, len(keys), behind.shape[1]
        read = torch.cat((norm(behind, w["input_layernorm"]), norm(states, w["hidden_norm"])), -1)
        positions = torch.arange(n)

        def heads(name: str) -> Tensor:
            found = F.linear(read, w[name])
            return found.view(*found.shape[:2], -1, DIMS).transpose(1, 2)

        query = turned(heads("q_proj"), positions)
        key, value = (
            one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (turned(heads("k_proj"), positions), heads("v_proj"))
        )
        keys.append((key, value))
        # A position sees what the target knew up to as many positions before as turns went by, and then its own line.
        seen = query @ keys[0][0].transpose(-1, -2)
        seen = seen.masked_fill(positions[None, :] > positions[:, None] - turn, -math.inf)
        line = [_shifted(keys[one][0], turn - one) for one in range(1, turn + 1)]
        own = [(query * one).sum(-1, keepdim=True) for one in line]
        shares = torch.softmax(torch.cat((seen, *own), -1) * DIMS**-0.5, -1)
        mixed = shares[..., :n] @ keys[0][1]
        for index in range(turn):
            mixed = mixed + shares[..., n + index : n + index + 1] * _shifted(keys[index + 1][1], turn - index - 1)
        states = states + F.linear(mixed.transpose(1, 2).flatten(2), w["o_proj"])
        x = norm(states, w["post_attention_layernorm"])
        return states + F.linear(F.silu(F.linear(x, w["gate_proj"])) * F.linear(x, w["up_proj"]), w["down_proj"])

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(norm(states, self.weights["norm"]), self.weights["lm_head"])

    def tensors(self) -> dict[str, Tensor]:
        return {stored_name(name): one.detach().to(torch.bfloat16).contiguous() for name, one in self.weights.items()}

    def begin_with(self, stored: dict[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.data.copy_(stored[stored_name(name)])


def stored_name(name: str) -> str:
    folders = {"q": "self_attn.", "k": "self_attn.", "v": "self_attn.", "o": "self_attn."}
    folders |= {"gate": "mlp.", "up": "mlp.", "down": "mlp."}
    folder = folders.get(name.removesuffix("_proj"), "") if name.endswith("_proj") else ""
    prefix = "" if name in ("fc", "norm", "lm_head") else "midlayer."
    return f"{prefix}{folder}{name}.weight"


def _shifted(x: Tensor, by: int) -> Tensor:  # along the positions: place i gets what place i - by has
    return x if by == 0 else F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]


def losses(head: Head, target: Any, ids: Tensor, kept: Tensor) -> tuple[Tensor, list[float]]:
    """The loss, and how often each turn drafts the target's likeliest token."""
    with torch.no_grad():
        found = target(ids, output_hidden_states=True)
        captured = torch.cat([found.hidden_states[layer] for layer in CAPTURES], -1)[:, :-1]
        wanted = found.logits[:, 1:].float()  # behind the token that position i reads
        best = wanted.argmax(-1)
        wanted = torch.softmax(wanted[..., kept], -1)
        embedded = target.model.embed_tokens(ids[:, 1:])
    states = F.linear(captured, head.weights["fc"])
    keys: list[tuple[Tensor, Tensor]] = []
    hits: list[float] = []
    total = torch.zeros(())
    for turn in range(TURNS):
        states = head(embedded, states, keys)
        logits = head.logits(states)
        # Position i drafts the token i + 2; where `turn` positions before it read what the head had made.
        found_here, wanted_here = logits[:, turn:], wanted[:, turn:]
        cross = -(wanted_here * F.log_softmax(found_here.float(), -1)).sum(-1)
        total = total + 0.9**turn * cross.mean()
        hits.append((kept[found_here.argmax(-1)] == best[:, turn:]).float().mean().item())
        states = _shifted(states, 1)
    return total, hits


def train_head(args: argparse.Namespace) -> None:
    """Can be stopped and started again; writes the head as a directory at its end."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    target = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    args.work.mkdir(parents=True, exist_ok=True)
    texts, state = args.work / "texts.pt", args.work / "head.pt"
    if not texts.is_file():
        torch.save(write_texts(args.model, Tokenizer.from_file(str(args.model / "tokenizer.json")), args.texts), texts)
    ids = torch.load(texts, weights_only=True)
    start = {} if args.start is None else load_file(args.start / "model.safetensors")
    kept = torch.bincount(ids.flatten(), minlength=target.config.vocab_size).topk(DRAFTED).indices.sort().values
    if start:
        kept = start["d2t"] + torch.arange(DRAFTED)
    head, done, seconds = Head(target, kept), 0, 0.0
    if start:
        head.begin_with(start)
    used = optimizers(head)
    if state.is_file():
        saved = torch.load(state, weights_only=True)
        head.load_state_dict(saved["head"])
        for optimizer, one in zip(used, saved["optimizers"], strict=True):
            optimizer.load_state_dict(one)
        done, seconds = saved["done"], saved["seconds"]
    began, shown = time.monotonic(), list[float]()
    for step in tqdm(range(done, args.steps), desc="training", disable=None):
        share = max(step / args.steps, (seconds + time.monotonic() - began) / (60 * args.minutes))
        rate = args.lr * min(1.0, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, share))))
        chosen = torch.randint(len(ids), (args.batch,), generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            loss, hits = losses(head, target, ids[chosen], kept)
        head.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in used:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        done, shown = step + 1, [0.9 * old + 0.1 * new for old, new in zip(shown or hits, hits, strict=True)]
        if share >= 1.0:
            break
    seconds += time.monotonic() - began
    kept_states = [optimizer.state_dict() for optimizer in used]
    torch.save({"head": head.state_dict(), "optimizers": kept_states, "done": done, "seconds": seconds}, state)
    write_head(args.out, target.config, head, kept)
    figures = {"steps": done, "minutes": round(seconds / 60, 1), "hits": [round(one, 3) for one in shown]}
    print(json.dumps(figures))


def write_head(directory: Path, target: Any, head: Head, kept: Tensor) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    drafted = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    ids = {"d2t": kept - torch.arange(DRAFTED), "t2d": drafted}
    save_file({**head.tensors(), **ids}, directory / "model.safetensors", {"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": DRAFTED,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIMS,
        "intermediate_size": INNER,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(CAPTURES),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
