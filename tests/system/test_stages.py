"""A worker that is a pipeline in a real troupe: a stage that is killed in mid-stream costs no stream and no token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.system.harness import MODEL, ROOT, Troupe, ask, streaming, troupe
from tests.system.test_ranks import followers, texts

OPTIONS = ("--num-blocks", "256", "--draft", "off", "--dtype", "float32", "--num-threads", "1")


def test_a_killed_stage_changes_no_text(tmp_path: Path) -> None:
    requests = [ask("One day", max_tokens=200, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]

    async def killed(running: Troupe) -> list[Any]:
        async with running.channel() as channel:
            tasks = await streaming(channel, requests)
            os.kill(followers(running)[-1], signal.SIGKILL)
            return await asyncio.gather(*tasks)

    with troupe(tmp_path / "alone", *OPTIONS) as running:
        wanted = texts(running.generate(requests))
    with troupe(tmp_path / "stages", *OPTIONS, "--pipeline-parallel-size", "3") as running:
        assert texts(running.generate(requests)) == wanted
        first = running.pids("worker")
        assert len(followers(running)) == 2
        assert texts(asyncio.run(killed(running))) == wanted
        assert running.pids("worker") != first, "a group ends with its stage"
        lines = running.logs()
    ended = [(line["rank"], line["status"]) for line in lines if line["event"] == "rank_ended"]
    assert len(ended) == 1 and ended[0][1] == -9


def test_more_stages_than_layers_are_refused_in_a_line() -> None:
    command = [sys.executable, "-m", "services.cli", "serve", "-m", str(MODEL), "--pipeline-parallel-size", "60"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 78
    assert b"pipeline_parallel_size is 60, but the model has" in ended.stderr
