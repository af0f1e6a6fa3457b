"""A worker of two processes in a real troupe: a rank that is killed in mid-stream costs no stream and no token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import MODEL, ROOT, Answer, Troupe, ask, free_port, streaming, troupe

PATIENCE = 20.0  # seconds, for a busy machine
OPTIONS = ("--tensor-parallel-size", "2", "--num-blocks", "256", "--draft", "off", "--dtype", "float32")


def followers(running: Troupe) -> list[int]:
    (leader,) = running.pids("worker")
    return followers_of(leader)


def followers_of(leader: int) -> list[int]:
    """None where it has ended."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(leader)]
    lines = subprocess.run(command, capture_output=True, check=False).stdout.decode().splitlines()
    return [int(line.split()[0]) for line in lines if "services.worker.groups.rank" in line]


def lives(pid: int) -> bool:
    """One that has ended may wait for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def texts(answers: list[list[Answer]]) -> list[tuple[str, list[int]]]:
    return [(one.text, one.token_ids) for each in answers for one in each]


TORCH = ("--device", "cpu", "--kernels", "torch", "--num-threads", "1", "--enable-dbo", "--dbo-token-threshold", "4")


@pytest.mark.parametrize("options", [(), TORCH], ids=["native", "torch"])
def test_a_killed_rank_changes_no_text(options: tuple[str, ...], tmp_path: Path) -> None:
    requests = [ask("One day", max_tokens=200, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]

    async def killed(running: Troupe) -> list[Any]:
        async with running.channel() as channel:
            tasks = await streaming(channel, requests)
            (follower,) = followers(running)
            os.kill(follower, signal.SIGKILL)
            return await asyncio.gather(*tasks)

    with troupe(tmp_path, *OPTIONS, *options) as running:
        wanted = texts(running.generate(requests))
        first = running.pids("worker")
        assert texts(asyncio.run(killed(running))) == wanted
        assert (running.pids("worker") == first) is (options != TORCH), "with native kernels the leader goes on"
        (follower,) = followers(running)
        running.kill("worker")
        deadline = time.monotonic() + PATIENCE
        while lives(follower):
            assert time.monotonic() < deadline, "ranks end with their leader"
            time.sleep(0.01)
        running.until_serving()
        assert texts(running.generate(requests)) == wanted
        lines = running.logs()
    assert [(line["rank"], line["status"]) for line in lines if line["event"] == "rank_ended"] == [(1, -9)]
    assert any("rank 1 of the group has ended" in line.get("error", "") for line in lines if line["event"] == "fatal")


def loads(running: Troupe) -> int:
    return sum(line["event"] == "model_loaded" and line["service"] != "draft" for line in running.logs())


def until(running: Troupe, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 3 * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    running.until_serving()


def test_those_that_are_left_keep_what_they_have_read(tmp_path: Path) -> None:
    """Of three ranks one is killed, then one is frozen; where ranks end again and again, all begin anew."""
    request = [ask("One day", max_tokens=60, temperature=0.9, seed=1, ignore_eos=True)]
    options = (*OPTIONS, "--num-threads", "1", "--resume-timeout", "120")
    with troupe(tmp_path, *options, "--tensor-parallel-size", "3") as running:
        wanted, leader = texts(running.generate(request)), running.pids("worker")
        first, second = followers(running)
        assert loads(running) == 3

        os.kill(first, signal.SIGKILL)
        until(running, lambda: loads(running) == 4, "a rank in its place reads the model")
        assert texts(running.generate(request)) == wanted
        assert running.pids("worker") == leader and second in followers(running) and first not in followers(running)

        os.kill(second, signal.SIGSTOP)
        until(running, lambda: loads(running) == 5, "a frozen rank is given up")
        assert texts(running.generate(request)) == wanted
        assert running.pids("worker") == leader and second not in followers(running) and not lives(second)

        begun = time.monotonic()
        while running.pids("worker") == leader:  # what begins is killed before it has read anything
            assert time.monotonic() < begun + 3 * PATIENCE, "not for ever"
            for pid in followers_of(leader[0])[-1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        running.until_serving()
        assert texts(running.generate(request)) == wanted
        events = [line["event"] for line in running.logs()]
        last = followers(running)
    assert events.count("group_forms_again") >= 3
    assert not any(map(lives, last)), "none is left behind"


@contextmanager
def rank_of_another_host(directory: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """It waits for its leader, and is started again whenever its group ends."""
    command = [sys.executable, "-m", "services.cli", "rank", "--join", f"tcp://127.0.0.1:{port}", "--rank", "1"]
    own = ["--runtime-dir", str(directory / "run"), "--num-threads", "1", "-m", str(MODEL)]
    with (directory / "rank.log").open("wb") as out:
        process = subprocess.Popen([*command, *own], cwd=ROOT, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_killed_rank_of_another_host_changes_no_text(tmp_path: Path) -> None:
    requests = [ask("One day", max_tokens=200, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]
    port = free_port()
    options = ("--executor", "hosts", "--rank-port", str(port), "--num-threads", "1", "--resume-timeout", "120")
    with rank_of_another_host(tmp_path, port) as rank, troupe(tmp_path, *OPTIONS, *options) as running:
        wanted = texts(running.generate(requests))

        async def killed() -> list[Any]:
            async with running.channel() as channel:
                tasks = await streaming(channel, requests)
                (follower,) = children(rank.pid)
                os.kill(follower, signal.SIGKILL)
                return await asyncio.gather(*tasks)

        assert texts(asyncio.run(killed())) == wanted
        lines = running.logs()
    assert [line["rank"] for line in lines if line["event"] == "rank_ended"] == ["rank 1"]
    assert [line["event"] for line in lines if line["event"] in ("rank_joined", "rank_ended")] == [
        "rank_joined",
        "rank_ended",
        "rank_joined",
    ]


def children(pid: int) -> list[int]:
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    return [int(word) for word in subprocess.run(command, capture_output=True, check=False).stdout.split()]


def test_more_ranks_than_kv_heads_are_refused_in_a_line() -> None:
    command = [sys.executable, "-m", "services.cli", "serve", "-m", str(ROOT / "models" / "pageant-stories")]
    ended = subprocess.run(
        [*command, "--tensor-parallel-size", "5"], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == 78
    assert b"tensor_parallel_size is 5, but the model has 4 KV heads" in ended.stderr


def test_ranks_with_whole_experts_say_what_one_process_says(tmp_path: Path) -> None:
    """As docs/ranks.md has it, with a random mixture behind the bundled tokenizer; experts are moved meanwhile."""
    pytest.importorskip("transformers", reason="needs transformers, which makes the checkpoint")
    from tests.engine.checkpoints import save_checkpoint  # it imports torch

    model = tmp_path / "mixture"
    save_checkpoint(model, "qwen3-moe", "native", {"vocab_size": 4096, "max_position_embeddings": 512})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (model / name).write_bytes((MODEL / name).read_bytes())
    options = ("-m", str(model), "--num-blocks", "256", "--draft", "off", "--dtype", "float32", "--num-threads", "1")
    requests = [ask("One day", max_tokens=40, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]
    said = []
    whole = ("--tensor-parallel-size", "2", "--enable-expert-parallel", "--enable-eplb")
    moved = ("--num-redundant-experts", "2", "--eplb-step-interval", "8")
    for name, sizes in (("one", ()), ("ranks", (*whole, *moved))):
        with troupe(tmp_path / name, *options, *sizes) as running:
            assert len(followers(running)) == (name == "ranks")
            said.append(texts(running.generate(requests)))
    assert said[0] == said[1]
