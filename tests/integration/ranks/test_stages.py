"""A pipeline under the scheduler's core, two plans in flight: forks, preemptions, windows, drafts change no token."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.state.policy import Policy
from tests.engine.checkpoints import save_checkpoint
from tests.engine.ranks import staged
from tests.integration.engine import MODEL, Engine, ask, token_ids
from tests.integration.ranks.grouped import GroupedEngine
from tests.integration.ranks.test_ranks import FORMATS, asks

pipelines = partial(GroupedEngine, grouped=staged, **FORMATS)


@pytest.mark.parametrize(("kind", "stages"), [("plain", 2), ("plain", 3), ("gemma3", 2)])
def test_forks_preemptions_and_windows(kind: str, stages: int, tmp_path: Path) -> None:
    model: dict[str, Any] = {"model": str(MODEL)}
    if kind != "plain":
        changes = {"vocab_size": 4096, "max_position_embeddings": 512, "num_key_value_heads": 2}
        save_checkpoint(tmp_path, kind, "native", changes)
        model = {"model": str(tmp_path), "has_windows": True}
    wanted = Engine(**FORMATS, **model).generate(asks(4000))
    policy = Policy(max_num_batched_tokens=64)
    with pipelines(policy=policy, processes=stages, num_blocks=24, **model) as engine:
        assert token_ids(engine.generate(asks(4000))) == token_ids(wanted)
        assert engine.counters.num_preemptions and any(plan.block_copies for _, plan in engine.plans)
        assert engine.most_begun == stages


def test_drafts_are_verified_by_the_last_stage() -> None:
    repeating = [ask([5 + n, 90, 7, 300 + n] * 6, seed=n, max_tokens=40, temperature=0.3 * n) for n in range(3)]
    wanted = Engine(**FORMATS).generate(repeating)
    with pipelines(policy=Policy(num_draft_tokens=4), draft="ngram") as engine:
        engine.join_draft("draft0")
        assert token_ids(engine.generate(repeating)) == token_ids(wanted)
        assert engine.counters.num_accepted_tokens > 0
