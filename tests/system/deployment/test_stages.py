"""A worker that is a pipeline in a real troupe: a stage that is killed in mid-stream costs no stream and no token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.system.deployment.test_ranks import children, texts
from tests.system.harness import MODEL, ROOT, Troupe, ask, streaming, troupe

OPTIONS = (
    "--num-blocks",
    "256",
    "--draft",
    "off",
    "--dtype",
    "float32",
    "--num-threads",
    "1",
    "--resume-timeout",
    "120",
)


def test_a_killed_stage_changes_no_text(tmp_path: Path) -> None:
    """Of two ranks; first one of them dies, which the leader of its stage has started, and then that leader."""
    requests = [ask("One day", max_tokens=200, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]

    async def killed(running: Troupe, *, whole_stage: bool) -> list[Any]:
        async with running.channel() as channel:
            tasks = await streaming(channel, requests)
            (leader,) = running.pids("worker")
            ((stage, rank),) = [(child, rank) for child in children(leader) for rank in children(child)]
            os.kill(stage if whole_stage else rank, signal.SIGKILL)
            return await asyncio.gather(*tasks)

    with troupe(tmp_path / "alone", *OPTIONS) as running:
        wanted = texts(running.generate(requests))
    sizes = ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2")
    with troupe(tmp_path / "stages", *OPTIONS, *sizes) as running:
        assert texts(running.generate(requests)) == wanted
        first = running.pids("worker")
        assert texts(asyncio.run(killed(running, whole_stage=False))) == wanted
        second = running.pids("worker")
        assert second != first, "a group ends with its rank"
        assert texts(asyncio.run(killed(running, whole_stage=True))) == wanted
        assert running.pids("worker") != second, "and with its stage"
        ended = [line["rank"] for line in running.logs() if line["event"] == "rank_ended"]
    assert ended[0] == 3 and ended[-1] == 2


def test_more_stages_than_layers_are_refused_in_a_line() -> None:
    command = [sys.executable, "-m", "services.cli", "serve", "-m", str(MODEL), "--pipeline-parallel-size", "60"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 78
    assert b"pipeline_parallel_size is 60, but the model has" in ended.stderr
