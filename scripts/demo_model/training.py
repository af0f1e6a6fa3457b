"""Training that can be stopped at any time and goes on where it was."""

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
from torch import Tensor, nn
from tqdm import tqdm

from scripts.demo_model.model import make_model

VOCABULARIES = ("embed_tokens.weight", "lm_head")


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024; torch 2.9) for the matrices inside the layers, AdamW for vocabularies and norms."""
    inside = (one for one in model.named_parameters() if not one[0].endswith(VOCABULARIES))
    matrices = {name: p for name, p in inside if p.dim() > 1}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    return [
        torch.optim.Muon(matrices.values(), weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


class BatchSampler:
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
def held_out_loss(model: Any, ids: np.ndarray, context: int) -> float:
    """Mean negative log-likelihood per token, in nats, over the held-out stories."""
    model.eval()
    losses = []
    for start in range(0, len(ids) - context - 1, context):
        window = torch.from_numpy(ids[start : start + context + 1].astype(np.int64))[None]
        losses.append(F.cross_entropy(model(window[:, :-1]).logits[0], window[0, 1:]).item())
    model.train()
    return sum(losses) / len(losses)


class TrainingRun:
    """One training: what a checkpoint holds, and the files it is kept in."""

    def __init__(self, work: Path, size: str, batch_tokens: int, dropout: float) -> None:
        self.model = make_model(size, dropout)
        self.optimizers = optimizers(self.model)
        self.step = 0
        self.batch_tokens = batch_tokens
        self.file, self.figures = work / f"{size}.pt", work / f"{size}.json"
        if self.file.exists():
            state = torch.load(self.file, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.step = state["step"]

    def save(self, held_out: float) -> None:
        """Replace the checkpoint, all at once."""
        partial = self.file.with_suffix(".partial")
        kept = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": kept, "step": self.step}
        torch.save(state, partial)
        partial.rename(self.file)
        figures = {"step": self.step, "held_out_loss": held_out, "batch_tokens": self.batch_tokens}
        self.figures.write_text(json.dumps(figures), encoding="utf-8")


def train(args: argparse.Namespace) -> None:
    """Train until `steps` are done or `minutes` are over."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(7)
    run = TrainingRun(args.work, args.size, args.batch * args.context, args.dropout)
    teacher = load_teacher(args.work) if args.size == "draft" else None
    sampler = BatchSampler(args.work, args.context, seed=run.step)
    held_out = np.load(args.work / "held_out.npy")
    end = time.monotonic() + args.minutes * 60
    with tqdm(initial=run.step, total=args.steps, desc=args.size) as bar:
        while run.step < args.steps and time.monotonic() < end:
            loss = loss_of(run.model, sampler.batch(args.batch), teacher)
            run.model.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            for optimizer in run.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(args.lr, run.step, args.steps)
                optimizer.step()
            run.step += 1
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if run.step % 100 == 0 or run.step == args.steps:
                now = held_out_loss(run.model, held_out, args.context)
                tqdm.write(f"step {run.step}: held-out loss {now:.4f} nats per token, perplexity {math.exp(now):.2f}")
                run.save(now)


def learning_rate(peak: float, step: int, steps: int) -> float:
    """A hundred steps of warm-up, then a cosine down to a twentieth of the peak."""
    return peak * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def loss_of(model: Any, ids: Tensor, teacher: Any) -> Tensor:
    """Cross entropy of ids [batch, time + 1], mixed with the teacher's distribution where there is a teacher."""
    logits = model(ids[:, :-1]).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, ids[:, 1:].flatten())
    if teacher is None:
        return loss
    with torch.no_grad():
        wanted = F.softmax(teacher(ids[:, :-1]).logits, -1).flatten(0, 1)
    return 0.3 * loss + 0.7 * F.cross_entropy(logits, wanted)


def load_teacher(work: Path) -> Any:
    """The trained target, for the draft to imitate."""
    model = make_model("target")
    model.load_state_dict(torch.load(work / "target.pt", weights_only=True)["model"])
    return model.eval()
