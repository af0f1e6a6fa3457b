"""A worker drafts with its head what plain torch says that the head drafts: of prompts, in chunks, behind accepted and
refused drafts, and behind a prefix that was cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.runner import ModelRunner
from engine.heads.drafter import HeadDrafter
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import KERNELS, VOCAB, make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.heads.mtp import write_mtp
from tests.engine.heads.oracle import Around, drafted, eagle1_oracle, eagle3_oracle, write_eagle1, write_eagle3

CAPTURES = (0, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3-norms": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "drafted": 60},
    "eagle3-each": {"fc_norm": True, "prefix": "layers.0.", "drafted": 60, "as_speculators": True},
}
MOST = 5

Draft = Callable[[list[int], int], list[int]]


def make(kind: str, kernels: str, tmp_path: Path) -> tuple[ModelRunner, Any, Draft]:
    """A runner with a head, and what that head drafts."""
    directory = tmp_path / "model"
    if kind.startswith("mtp"):
        model, head = write_mtp(directory, kind.removeprefix("mtp-"), kernels)
        draft = "mtp"
    else:
        model = save_checkpoint(directory, "llama-mha", kernels)
        hidden, weights = model.config.hidden_size, model.state_dict()
        draft = f"eagle:{tmp_path / 'head'}"
        if kind == "eagle1":
            write_eagle1(tmp_path / "head", hidden, VOCAB)
            head = eagle1_oracle(tmp_path / "head", weights["lm_head.weight"])
        else:
            write_eagle3(tmp_path / "head", hidden, VOCAB, CAPTURES, **OPTIONS[kind])
            embed = weights["model.embed_tokens.weight"]
            head = eagle3_oracle(tmp_path / "head", embed, CAPTURES, **OPTIONS[kind])
    runner = make_runner(directory, kernels, dtype="float32", draft=draft, max_num_draft_tokens=MOST)
    return runner, model, _drafts_of(model, head)


def _drafts_of(model: Any, head: Around) -> Draft:
    return lambda token_ids, count: drafted(model, head, token_ids, count)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["eagle1", *OPTIONS, "mtp-deepseek-v3", "mtp-qwen3.5", "mtp-qwen3-next"])
def test_drafts_are_those_of_plain_torch(kind: str, kernels: str, tmp_path: Path) -> None:
    runner, model, oracle = make(kind, kernels, tmp_path)
    driver = Driver(runner)
    first, second = driver.add(3, random_prompt(37, 1)), driver.add(1, random_prompt(21, 2))
    result = driver.step({3: 20}, num_wanted_drafts=[4])
    assert result.num_head_drafts == [], "a prompt in part is drafted for later"
    result = driver.step({3: 17, 1: 21}, num_wanted_drafts=[4, MOST])
    assert result.num_head_drafts == [4, MOST]
    drafts = {3: result.head_draft_ids[:4], 1: result.head_draft_ids[4:]}
    assert drafts == {3: oracle(first.token_ids, 4), 1: oracle(second.token_ids, MOST)}
    # Of what the model takes itself two are accepted, and then the head goes on from there.
    known = taken(model, first.token_ids, 3)
    drafts[3] = [*known[:2], (known[2] + 1) % VOCAB, 5]
    before = len(first.token_ids)
    result = driver.step({3: 5, 1: 1 + MOST}, drafts, num_wanted_drafts=[3, 0])
    assert len(first.token_ids) == before + 3, "two were accepted"
    assert result.num_head_drafts == [3, 0]
    assert result.head_draft_ids == oracle(first.token_ids, 3)
    for _ in range(2):
        result = driver.step({3: 1, 1: 1}, num_wanted_drafts=[1, 2])
    assert result.head_draft_ids == oracle(first.token_ids, 1) + oracle(second.token_ids, 2)


SAMPLED = {
    3: SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    1: SamplingParams(temperature=0.0),
    2: SamplingParams(temperature=1.5, top_k=20, min_p=0.02, seed=2),
}


def test_drafts_in_one_call_are_drawn_as_step_by_step(tmp_path: Path) -> None:
    found = []
    for at_once in (True, False):
        runner, *_ = make("eagle3-norms", "native", tmp_path / str(at_once))
        assert isinstance(runner._drafter, HeadDrafter) and runner._drafter._at_once is not None
        if not at_once:
            runner._drafter._at_once = None
        driver = Driver(runner)
        for row, params in SAMPLED.items():
            driver.add(row, random_prompt(20 + row, row), params, seed=row)
        result = driver.step({row: 20 + row for row in SAMPLED}, num_wanted_drafts=[MOST, 2, MOST])
        found.append((result.num_head_drafts, result.head_draft_ids))
    assert found[0] == found[1] and found[0][0] == [MOST, 2, MOST]


@torch.inference_mode()
def taken(model: Any, token_ids: list[int], count: int) -> list[int]:
    """The model's likeliest tokens behind these."""
    ids = list(token_ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(token_ids) :]
