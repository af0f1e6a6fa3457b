#!/usr/bin/env python3
"""Train the bundled story model and its draft, from plain text to Hugging Face directories.

    scripts/train_demo_model.py corpus --cased FILE --lower FILE --work DIR
    scripts/train_demo_model.py train  --work DIR --size target|draft [--minutes 60] [--threads 2]
    scripts/train_demo_model.py export --work DIR --size target|draft --out DIR

`corpus` cleans and tokenizes the stories (restoring the case of the lower-cased ones), `train` can be
stopped and started again at any time, `export` writes config.json, model.safetensors, the tokenizer
and the generation defaults.  Needs torch, numpy, tokenizers, safetensors and tqdm.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

EOS, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIALS = [EOS, USER, ASSISTANT, END]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] | trim }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Shape:
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
    "target": Shape(hidden=256, layers=5, heads=8, kv_heads=4, head_dim=32, intermediate=704),
    "draft": Shape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=352),
}


# ---------------------------------------------------------------- text


def read_stories(path: Path) -> list[str]:
    """Split a file in which single newlines part stories and double ones part paragraphs."""
    marked = path.read_text(encoding="utf-8").replace("\n\n", "\x00")
    return [story.replace("\x00", "\n\n").strip() for story in marked.split("\n") if len(story) > 80]


def restore_case(stories: list[str], cased: list[str]) -> list[str]:
    """Give lower-cased stories their capitals back: sentence starts, "I", and names.

    A word is a name where the cased stories mostly capitalise it inside a sentence, or where this
    story introduces it by "named".
    """
    forms: dict[str, Counter[str]] = {}
    for story in cased:
        for word in re.findall(r"(?<=[a-z,] )[A-Za-z]+", story):
            forms.setdefault(word.lower(), Counter())[word] += 1
    common = {word: counts.most_common(1)[0][0] for word, counts in forms.items()}

    def restore(story: str) -> str:
        names = set(re.findall(r"(?:named|called|name was|name is) ([a-z]+)", story)) - {"the", "a", "his", "her"}
        words = re.sub(
            r"(?<!')[a-z]+",
            lambda m: m[0].capitalize() if m[0] in names else common.get(m[0], m[0]),
            story,
        )
        words = re.sub(r"\bi\b", "I", words)
        return re.sub(
            r"(^|[.!?]\s+\"?|[.!?]\"\s+(?=[A-Z\"])|\n\s*\"?|[,:] \")([a-z])", lambda m: m[1] + m[2].upper(), words
        )

    return [restore(story) for story in stories]


def ask_for(story: str, rare: dict[str, int], rng: random.Random) -> str:
    """An instruction that this story would be a good answer to, naming a person or things in it."""
    name = re.search(r"(?:named|called|name was) ([A-Z][a-z]+)", story)
    kind = re.search(r"(?:a|an) (?:\w+ )?(\w+) (?:named|called)", story)
    if name and kind and rng.random() < 0.5:
        return f"Tell me a story about a {kind[1]} named {name[1]}."
    words = {word for word in re.findall(r"\b[a-z]{3,}\b", story) if 20 < rare.get(word, 0) < 1500}
    picked = sorted(words, key=lambda word: rare[word] + rng.random() * 300)[:2]
    if len(picked) < 2 or rng.random() < 0.2:
        return rng.choice(["Tell me a story.", "Please tell me a short story.", "Write a story for a child."])
    return rng.choice(["Tell me a story about a {}.", "Write a short story with a {} and a {}."]).format(*picked)


def train_tokenizer(stories: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE, so that no text is unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories, trainer)
    return tokenizer


def build_corpus(args: argparse.Namespace) -> None:
    rng = random.Random(1)
    cased = read_stories(args.cased)
    known = {story.lower() for story in cased}
    real = cased + restore_case([s for s in read_stories(args.lower) if s not in known], cased)
    rng.shuffle(real)
    held_out, real = real[:200], real[200:]
    tokenizer = train_tokenizer(real, SHAPES["target"].vocab)
    rare = Counter(word for story in real for word in set(re.findall(r"\b[a-z]{3,}\b", story)))
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.work / "tokenizer.json"))

    def encode(story: str, instructed: bool) -> list[int]:
        text = f"{USER}{ask_for(story, rare, rng)}{END}{ASSISTANT}{story}{END}" if instructed else story
        return tokenizer.encode(EOS + text).ids

    for name, stories, share in (("real", real, 0.0), ("chat", real, 1.0), ("held_out", held_out, 0.0)):
        ids = [i for story in stories for i in encode(story, rng.random() < share)]
        np.save(args.work / f"{name}.npy", np.array(ids, dtype=np.uint16))
        print(f"{name}: {len(stories)} stories, {len(ids):,} tokens")
    chars = sum(map(len, held_out))
    print(f"held-out characters per token: {chars / len(np.load(args.work / 'held_out.npy')):.3f}")


# ---------------------------------------------------------------- model


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
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
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [..., time, head_dim]
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
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

    def __init__(self, shape: Shape) -> None:
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


# ---------------------------------------------------------------- training


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, by five Newton-Schulz steps (Jordan et al., Muon, 2024)."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized steps, in float32: torch's own does them in bfloat16, slow on many CPUs."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(momentum, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


class Sampler:
    """Draws training windows, a third of them stories that answer an instruction."""

    def __init__(self, work: Path, context: int, seed: int) -> None:
        self.parts = {name: np.load(work / f"{name}.npy") for name in ("real", "chat")}
        self.context, self.rng = context, np.random.default_rng(seed)

    def batch(self, size: int) -> Tensor:
        """Token ids [size, context + 1]."""
        names = self.rng.choice(["chat", "real"], size, p=[0.35, 0.65])
        rows = []
        for name in names:
            part = self.parts[name]
            start = self.rng.integers(0, len(part) - self.context - 1)
            rows.append(part[start : start + self.context + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


@torch.inference_mode()
def held_out_loss(model: Llama, ids: np.ndarray, context: int) -> float:
    """Mean negative log-likelihood per token, in nats, over the held-out stories."""
    model.eval()
    losses = []
    for start in range(0, len(ids) - context - 1, context):
        window = torch.from_numpy(ids[start : start + context + 1].astype(np.int64))[None]
        losses.append(F.cross_entropy(model(window[:, :-1])[0], window[0, 1:]).item())
    model.train()
    return sum(losses) / len(losses)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(7)
    shape = SHAPES[args.size]
    model = Llama(shape)
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    optimizers = [
        Muon(matrices, lr=args.lr),
        torch.optim.AdamW(others, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    state_file = args.work / f"{args.size}.pt"
    step = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step = state["step"]
    teacher = load_teacher(args.work) if args.size == "draft" else None
    sampler = Sampler(args.work, args.context, seed=step)
    held_out = np.load(args.work / "held_out.npy")
    started, bar = time.monotonic(), tqdm(initial=step, total=args.steps, desc=args.size)

    def save() -> None:
        partial = state_file.with_suffix(".partial")
        torch.save(
            {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}, partial
        )
        partial.rename(state_file)
        (args.work / f"{args.size}.json").write_text(
            json.dumps({"step": step, "held_out_loss": loss_now, "batch_tokens": args.batch * args.context})
        )

    while step < args.steps and time.monotonic() - started < args.minutes * 60:
        progress = step / args.steps
        warm = min(1.0, (step + 1) / 100)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = args.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        ids = sampler.batch(args.batch)
        logits = model(ids[:, :-1], args.dropout)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        if teacher is not None:
            with torch.inference_mode():
                wanted = F.softmax(teacher(ids[:, :-1]), -1)
            loss = 0.3 * loss + 0.7 * F.cross_entropy(logits.flatten(0, 1), wanted.clone().flatten(0, 1))
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        bar.update()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if step % 100 == 0 or step == args.steps:
            loss_now = held_out_loss(model, held_out, args.context)
            tqdm.write(f"step {step}: held-out loss {loss_now:.4f} nats per token, perplexity {math.exp(loss_now):.2f}")
            save()


def load_teacher(work: Path) -> Llama:
    """The trained target, for the draft to imitate."""
    model = Llama(SHAPES["target"])
    model.load_state_dict(torch.load(work / "target.pt", weights_only=True)["model"])
    return model.eval()


# ---------------------------------------------------------------- export


def export(args: argparse.Namespace) -> None:
    shape, out = SHAPES[args.size], args.out
    out.mkdir(parents=True, exist_ok=True)
    weights = torch.load(args.work / f"{args.size}.pt", weights_only=True)["model"]
    save_file(
        {f"model.{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()},
        out / "model.safetensors",
        {"format": "pt"},
    )
    eos, end = (Tokenizer.from_file(str(args.work / "tokenizer.json")).token_to_id(token) for token in (EOS, END))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocab, "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.intermediate, "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": eos, "eos_token_id": eos,
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": EOS, "eos_token": EOS, "add_bos_token": True,
        "add_eos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": shape.context, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    generation = {"bos_token_id": eos, "eos_token_id": [eos, end], "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    for name, content in (
        ("config", config),
        ("tokenizer_config", tokenizer_config),
        ("generation_config", generation),
    ):
        (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "tokenizer.json").write_text((args.work / "tokenizer.json").read_text())
    size = sum(tensor.numel() for tensor in load_file(out / "model.safetensors").values())
    figures = json.loads((args.work / f"{args.size}.json").read_text())
    print(json.dumps({"parameters": size, "shape": asdict(shape), **figures}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    corpus = verbs.add_parser("corpus")
    corpus.add_argument("--cased", type=Path, required=True)
    corpus.add_argument("--lower", type=Path, required=True)
    corpus.set_defaults(run=build_corpus)
    training = verbs.add_parser("train")
    training.add_argument("--steps", type=int, default=1500)
    training.add_argument("--minutes", type=float, default=120)
    training.add_argument("--batch", type=int, default=8)
    training.add_argument("--context", type=int, default=512)
    training.add_argument("--lr", type=float, default=3e-3)
    training.add_argument("--dropout", type=float, default=0.1)
    training.add_argument("--threads", type=int, default=2)
    training.set_defaults(run=train)
    exporting = verbs.add_parser("export")
    exporting.add_argument("--out", type=Path, required=True)
    exporting.set_defaults(run=export)
    for verb in (corpus, training, exporting):
        verb.add_argument("--work", type=Path, required=True)
    for verb in (training, exporting):
        verb.add_argument("--size", choices=sorted(SHAPES), required=True)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
