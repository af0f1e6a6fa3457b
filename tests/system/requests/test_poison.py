"""Poison beside the healthy, over gRPC and as raw frames on the bus: streams stay as they are, no process dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from services.cli.display.client import TerminalClient
from shared.messages.inboxes import DetokenizerInbox, GatewayInbox, SchedulerInbox, TokenizerInbox, WorkerInbox
from tests.messages.fuzz.frames import FrameFuzzer
from tests.system.harness import Troupe, streaming, troupe
from tests.system.harness import ask as healthy
from tests.system.requests.poison import Ending, Poison, corpus, swallow
from tests.system.requests.test_two_hundred import same

NUM_HEALTHY = 32
SERVICES = ("gateway", "tokenizer", "scheduler", "detokenizer", "worker")
FRAMES_PER_SOCKET = 2_000
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # of ZeroMQ's wire protocol
CASES = corpus()
UNIONS: dict[str, Any] = {
    "gateway": GatewayInbox, "tokenizer": TokenizerInbox, "scheduler": SchedulerInbox, "detokenizer": DetokenizerInbox,
    "worker": WorkerInbox,
}  # fmt: skip


def healthy_requests() -> list[Any]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8}, {"n": 2, "top_k": 20},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 0.0, "logprobs": 3}, {"stop": ["Lily", "dog."]}, {"logit_bias": {10: 2.0}, "min_tokens": 5},
        {"top_p": 0.9, "min_p": 0.05},
    ]  # fmt: skip
    return [
        healthy(
            f"Story {index}. Once upon a time", seed=index, max_tokens=160, ignore_eos=True, **kinds[index % len(kinds)]
        )
        for index in range(NUM_HEALTHY)
    ]


def test_the_corpus_is_large_and_each_case_is_one() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.timeout(600)
def test_poison_beside_healthy_streams(tmp_path: Path) -> None:
    options = ["--max-num-seqs", "96", "--num-threads", "1"]
    with troupe(tmp_path, *options) as running:
        wanted = running.generate(healthy_requests())
        pids = {service: running.pids(service) for service in SERVICES}
        answers, endings = asyncio.run(side_by_side(running, tmp_path / "run"))
        assert {service: running.pids(service) for service in SERVICES} == pids, "a process died"
        again = running.generate(healthy_requests()[:8])
        running.settled_load()
        client = TerminalClient(running.address)
        assert client.serving
        client.close()
        logs = running.logs()
    assert not [index for index, pair in enumerate(zip(answers, wanted, strict=True)) if not same(*pair)]
    assert all(same(*pair) for pair in zip(again, wanted[:8], strict=True))
    wrong = [
        f"{case.name}: {ending}" for case, ending in zip(CASES, endings, strict=True) if not as_wanted(case, ending)
    ]
    assert not wrong, "\n".join(wrong)
    assert not [line for line in logs if line["event"] in ("fatal", "step_failed", "incident", "stalled")]
    assert len([line for line in logs if line["event"] == "message_dropped"]) > 4, "frames came"
    assert not (tmp_path / "run" / "incidents").exists()
    print(f"{len(CASES)} poisons, {NUM_HEALTHY} streams")


def as_wanted(case: Poison, ending: Ending) -> bool:
    if ending.code is not case.code:
        return False
    return not case.field or (ending.blamed == case.field and case.field in ending.details)


async def side_by_side(running: Troupe, run: Path) -> tuple[list[Any], list[Ending]]:
    """The healthy begin; once all stream, poison and raw frames come beside them."""
    requests = healthy_requests()
    async with running.channel() as channel, running.channel() as other:
        streams = await streaming(channel, requests)
        assert not all(stream.done() for stream in streams)
        bus = asyncio.create_task(asyncio.to_thread(assault, run))
        endings = await asyncio.gather(*(swallow(other, case) for case in CASES))
        await bus
        return await asyncio.gather(*streams), endings


def assault(run: Path) -> None:
    """Raw frames at every socket of the deployment, by a process that can open them but knows no name of an actor."""
    sockets = sorted(path for path in run.glob("*.sock") if path.stem != "serve")
    assert len(sockets) >= len(SERVICES)
    with zmq.Context() as context:
        for index, path in enumerate(sockets):
            frames = FrameFuzzer(UNIONS.get(path.stem.partition("-")[0], GatewayInbox), seed=index)
            with context.socket(zmq.PUSH) as pusher:
                pusher.linger = pusher.sndtimeo = 30_000  # a service that does not read fails the test
                pusher.connect(f"ipc://{path}")
                for frame in itertools.islice(frames, FRAMES_PER_SOCKET):
                    pusher.send(frame)
            for bomb in (b"\xff" * 64, GREETING + b"\x06" + b"\xff" * 8 + b"x" * 4096, GREETING[:20], b"\0" * 4096):
                send(path, bomb)


def send(path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was told that this makes no sense
            connection.sendall(data)
