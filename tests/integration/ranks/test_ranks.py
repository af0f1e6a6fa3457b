"""A group of ranks under the scheduler's core: forks, preemptions, windows, chunks and drafts change no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.scheduler.state.policy import Policy
from tests.engine.checkpoints import save_checkpoint
from tests.integration.engine import MODEL, Ask, Engine, ask, token_ids
from tests.integration.ranks.grouped import GroupedEngine

FORMATS: dict[str, Any] = {"dtype": "float32", "kernels": "native"}
TORCH: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "device": "cpu", "num_threads": 1}


def asks(vocab_size: int) -> list[Ask]:
    """Greedy, sampled, penalised, with siblings and log-probabilities; two share a beginning."""
    rng = random.Random(5)
    prompts = [[rng.randrange(4, vocab_size) for _ in range(count)] for count in (3, 16, 40, 90, 33, 17)]
    prompts[4][:17] = prompts[5]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8, "n": 3},
        {"temperature": 1.1, "repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.7, "frequency_penalty": 0.5},
        {"temperature": 0.8, "n": 2, "logit_bias": {17: 2.0}},
    ]
    return [ask(prompt, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        ("plain", FORMATS),
        ("gemma3", FORMATS),
        ("plain", TORCH),
        ("gemma3", TORCH),
        ("gemma3", TORCH | {"enable_dbo": True, "dbo_token_threshold": 4}),
    ],
    ids=["plain", "gemma3", "torch-plain", "torch-gemma3", "torch-gemma3-halves"],
)
def test_forks_preemptions_and_windows(kind: str, formats: dict[str, Any], tmp_path: Path) -> None:
    model: dict[str, Any] = {"model": str(MODEL)}
    if kind != "plain":
        changes = {"vocab_size": 4096, "max_position_embeddings": 512, "num_key_value_heads": 2}
        save_checkpoint(tmp_path, kind, "native", changes)
        model = {"model": str(tmp_path), "has_windows": True}
    torch.set_num_threads(1)  # forks have none of this process's threads
    alone = {name: value for name, value in formats.items() if "dbo" not in name}
    wanted = Engine(**alone, **model).generate(asks(4000))
    policy = Policy(max_num_batched_tokens=64)
    with GroupedEngine(policy, num_blocks=24, **formats, **model) as engine:
        assert token_ids(engine.generate(asks(4000))) == token_ids(wanted)
        assert engine.counters.num_preemptions and any(plan.block_copies for _, plan in engine.plans)


@pytest.mark.parametrize("formats", [FORMATS, TORCH], ids=["native", "torch"])
def test_drafts_are_verified_by_all_ranks(formats: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    repeating = [ask([5 + n, 90, 7, 300 + n] * 6, seed=n, max_tokens=40, temperature=0.3 * n) for n in range(3)]
    wanted = Engine(**formats).generate(repeating)
    with GroupedEngine(Policy(num_draft_tokens=4), draft="ngram", **formats) as engine:
        engine.join_draft("draft0")
        assert token_ids(engine.generate(repeating)) == token_ids(wanted)
        assert engine.counters.num_accepted_tokens > 0
