"""Checkpoints that classify: their scores are those of transformers, and what they cannot do is refused by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.scheduler.state.policy import Policy
from shared.requests.pooling import Pooling, PoolingKind
from tests.integration.engine import ask
from tests.integration.outputs.test_embeddings import Embedder

RNG = random.Random(7)
PROMPTS = [[RNG.randrange(4, 200) for _ in range(length)] for length in (1, 17, 40)]
SIZES: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"num_labels": 1, "head_dim": 16},
    "Llama": {"id2label": {0: "dull", 1: "fine", 2: "great"}},
    "Gemma2": {"num_labels": 4, "problem_type": "multi_label_classification", "head_dim": 16},
}
RAW, SCORES = Pooling(PoolingKind.CLASSIFY, False), Pooling(PoolingKind.CLASSIFY, True)


def made(directory: Path, family: str) -> Any:
    """A random checkpoint in `directory`; returns transformers' own model of it."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    model.save_pretrained(directory)
    return model


def logits_of(model: Any, prompt: list[int]) -> Tensor:  # [num_labels]
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([prompt])).logits[0]
    return found


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family: str, kernels: str, tmp_path: Path) -> None:
    oracle = made(tmp_path, family)
    engine = Embedder(Policy(max_num_batched_tokens=16), kernels=kernels, model=str(tmp_path))
    activate = torch.nn.Softmax(0) if family == "Llama" else torch.nn.Sigmoid()
    scores, raw = engine.embed(PROMPTS, SCORES), engine.embed(PROMPTS, RAW)
    for prompt, score, logits in zip(PROMPTS, scores, raw, strict=True):
        wanted = logits_of(oracle, prompt)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
        torch.testing.assert_close(score, activate(wanted), atol=1e-4, rtol=0)
    labels = next(iter(engine.runners.values())).capacity.labels
    assert labels == (["dull", "fine", "great"] if family == "Llama" else [f"LABEL_{n}" for n in range(len(wanted))])


def test_a_model_that_classifies_generates_nothing_and_others_give_no_scores(tmp_path: Path) -> None:
    made(tmp_path, "Qwen3")
    engine = Embedder(model=str(tmp_path))
    engine.add(ask([5, 6]))
    engine.run()
    other = Embedder()
    other.ask_for([5, 6], SCORES)
    other.run()
    found = [(one.field, one.message) for one in (*engine.rejected, *other.rejected)]
    assert [field for field, _ in found] == ["model", "model"]
    assert "/classify" in found[0][1] and "ForSequenceClassification" in found[1][1]
