"""A troupe whose lines go where they cannot: its streams go on, and so do its processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import grpc
import pytest

from tests.system.harness import MODEL, READY_SECONDS, ROOT, Answer, Troupe, ask, collect, free_port

SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
OPTIONS = ("--num-blocks", "1024", "--num-threads", "1", "--log-format", "json", "--log-steps")
NUM_TOKENS = 500
REQUESTS = [ask("One day", seed=index, max_tokens=NUM_TOKENS, ignore_eos=True) for index in range(8)]


@contextmanager
def unheard(directory: Path, stderr: int | IO[bytes]) -> Iterator[Troupe]:
    """`pageant serve` that says everything to `stderr`; it must end well and quickly."""
    port = free_port()
    command = [sys.executable, "-m", "services.cli", "serve", "-m", str(MODEL), "--port", str(port), *OPTIONS]
    command += ["--http-port", "-1", "--runtime-dir", str(directory / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=stderr, stderr=stderr)
    running = Troupe(process, port, -1, directory)
    try:
        with grpc.insecure_channel(running.address) as channel:
            grpc.channel_ready_future(channel).result(READY_SECONDS)
        running.until_serving(READY_SECONDS)
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def all_pids(running: Troupe) -> dict[str, list[int]]:
    return {service: running.pids(service) for service in SERVICES}


class Reader(threading.Thread):
    """Reads a pipe until it is told to pause, or to its end."""

    def __init__(self, file: int) -> None:
        super().__init__(daemon=True)
        self.said = b""
        self.may_read = threading.Event()
        self.may_read.set()
        self._file = file
        self.start()

    def run(self) -> None:
        while self.may_read.wait() and (data := os.read(self._file, 1 << 16)):
            self.said += data
        os.close(self._file)

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.said.splitlines() if line.startswith(b"{")]


def texts(answers: list[list[Answer]]) -> list[tuple[list[int], str]]:
    return [(answer.token_ids, answer.text) for (answer,) in answers]


def test_a_reader_that_leaves_in_mid_stream_is_not_missed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with unheard(tmp_path, writer) as running:
        os.close(writer)
        before = all_pids(running)
        threading.Thread(target=os.read, args=(reader, 100)).start()  # as `head -1` does
        wanted = running.generate([ask("One day", seed=1, max_tokens=300, ignore_eos=True)])

        async def leave() -> list[Answer]:
            async with running.channel() as channel:
                begun = asyncio.Event()
                request = ask("One day", seed=1, max_tokens=300, ignore_eos=True)
                stream = asyncio.create_task(collect(channel, request, begun=begun))
                await begun.wait()
                os.close(reader)
                return await stream

        assert texts([asyncio.run(leave())]) == texts(wanted)
        assert texts(running.generate([ask("One day", seed=1, max_tokens=300, ignore_eos=True)])) == texts(wanted)
        assert all_pids(running) == before


def test_a_reader_that_does_not_read_is_told_what_it_missed(tmp_path: Path) -> None:
    file, writer = os.pipe()
    reader = Reader(file)
    with unheard(tmp_path, writer) as running:
        os.close(writer)
        before = all_pids(running)
        wanted = texts(running.generate(REQUESTS))
        reader.may_read.clear()
        for _ in range(3):
            assert texts(running.generate(REQUESTS)) == wanted
        assert all_pids(running) == before
        reader.may_read.set()
    reader.join(30)
    gaps = [event for event in reader.events() if event["event"] == "log_lines_dropped"]
    assert "scheduler" in {gap["service"] for gap in gaps}
    assert all(isinstance(gap["num_dropped"], int) and gap["num_dropped"] > 0 for gap in gaps)
    told = sum(event["event"] == "step_finished" for event in reader.events())
    missing = sum(int(str(gap["num_dropped"])) for gap in gaps if gap["service"] == "scheduler")
    assert told + missing > 0.9 * 4 * NUM_TOKENS, "what is not there is counted"
    assert reader.events()[-1]["event"] == "stopped"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_costs_lines(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full, unheard(tmp_path, full) as running:
        before = all_pids(running)
        first, second = running.generate(REQUESTS[:2]), running.generate(REQUESTS[:2])
        assert texts(first) == texts(second)
        assert all_pids(running) == before
