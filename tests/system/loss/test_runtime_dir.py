"""The runtime directory is deleted under a troupe that serves: nothing ends, and afterwards all is as it was."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.system.harness import MODEL, ROOT, Answer, ask, collect, free_port, troupe

OPTIONS = ("--num-blocks", "256", "--num-threads", "1")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def command(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "services.cli", words[0], "--runtime-dir", str(run), *words[1:]]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_a_directory_that_is_deleted_while_a_stream_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    request = ask("One day", seed=3, max_tokens=600, ignore_eos=True)
    with troupe(tmp_path, *OPTIONS) as running:
        ((wanted,),) = running.generate([request])
        sockets = sorted(path.name for path in run.glob("*.sock"))

        async def bereave() -> list[Answer]:
            async with running.channel() as channel:
                begun = asyncio.Event()
                stream = asyncio.create_task(collect(channel, request, begun=begun))
                await begun.wait()
                shutil.rmtree(run)
                return await stream

        (answer,) = asyncio.run(bereave())
        assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
        until(lambda: sorted(path.name for path in run.glob("*.sock")) == sockets)
        done = command(run, "scale", "worker=2")
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(running.pids("worker")) == 2
        until(lambda: len(running.load().workers) == 2)
        running.kill("worker", at_most=1)
        ((again,),) = running.generate([request])
        assert (again.token_ids, again.text) == (wanted.token_ids, wanted.text)
        second = command(run, "serve", "-m", str(MODEL), "--port", str(free_port()), "--http-port", "-1")
        assert second.returncode == 78 and "a scheduler runs in" in second.stderr
        renewed = [line["service"] for line in running.logs() if line["event"] == "runtime_dir_renewed"]
        assert {"scheduler", "worker", "gateway", "tokenizer", "detokenizer"} <= set(renewed)
