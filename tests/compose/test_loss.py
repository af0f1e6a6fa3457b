"""Containers die, freeze, lose their network and are replaced while streams go on: none fails or changes."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.pageant.v1.inference_pb2 import GenerateRequest
from scripts.bench.chaos.cases import PLAIN
from scripts.bench.chaos.main import ChaosOrder, act, containers, table
from scripts.bench.common.stack import ROOT, SERVICES, DockerError, Stack
from tests.compose.stack import crash, health, name_of, running_stack, until, why_not
from tests.compose.streams import PROMPT, complete, listen, settle, streaming

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

DRAIN_SECONDS = 6.0  # five, and what Docker itself takes
EXIT_CONFIG, KILLED = 78, 137


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("compose"), num_blocks=1024, num_threads=1) as started:
        yield started


def test_the_short_chaos_changes_nothing(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with containers(tmp_path, "on") as stage:
        result = asyncio.run(act(stage, ChaosOrder(num_faults=14, seed=5, per_kind=1, max_tokens=120)))
    print(table(result))
    assert not result.wrong, result.wrong[:5]
    assert not result.leftovers
    assert all(result.num_streams[kind] for kind in (*PLAIN, "stop strings", "bytes", "grammar"))
    assert len(result.inflicted) == 14 and sum(result.num_streams.values()) > result.num_clients
    assert result.drafts[1] > 0, "drafts were accepted meanwhile"


def test_every_container_is_replaced_and_no_request_fails(stack: Stack) -> None:
    stack.up(worker=2, gateway=2)
    before = {service: {one["ID"] for one in stack.containers(service)} for service in SERVICES}
    expected = complete(stack.address)
    with streaming(stack.address) as texts:
        done = subprocess.run(
            [ROOT / "scripts" / "roll"], env=stack.environment, cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        settle(texts)
    assert done.returncode == 0, done.stderr
    assert len(texts) > 20 and set(texts) == {expected}
    for service in SERVICES:
        after = {one["ID"] for one in stack.containers(service)}
        assert len(after) == len(before[service]) and not after & before[service], service
    print(done.stdout)
    times = [float(found) for found in re.findall(r"left in ([0-9.]+) s", done.stdout)]
    assert len(times) == 7 and max(times) < DRAIN_SECONDS


def test_who_crashes_is_started_again_and_who_was_killed_by_hand_is_not(stack: Stack) -> None:
    name = name_of(stack, "tokenizer")
    restarts = int(stack.inspect(name, "{{.RestartCount}}"))
    crash(stack, name)
    until(lambda: int(stack.inspect(name, "{{.RestartCount}}")) > restarts)
    until(lambda: health(stack, name) == "healthy")
    stack.docker("kill", "--signal", "KILL", name)
    assert stack.inspect(name, "{{.State.Status}} {{.State.ExitCode}}") == f"exited {KILLED}"
    stack.docker("start", name)
    until(lambda: health(stack, name) == "healthy")


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"PAGEANT_MODEL": "/nowhere"}, EXIT_CONFIG, "nowhere"),
        ({"PAGEANT_BLOCK_SIZE": "32"}, EXIT_CONFIG, "its block_size is 32"),  # started again it would be refused again
    ],
)
def test_a_fatal_error_is_an_exit_status(stack: Stack, settings: dict[str, str], status: int, words: str) -> None:
    given = [part for name, value in settings.items() for part in ("-e", f"{name}={value}")]
    with pytest.raises(DockerError) as caught:
        stack.compose("run", "--rm", "--no-deps", *given, "worker")
    assert caught.value.status == status
    assert words in str(caught.value)
    incidents = stack.run_in("scheduler", "sh", "-c", "ls /run/pageant/incidents 2>/dev/null || true")
    assert "worker" not in incidents, "a defect leaves an incident, a wrong setting does not"


def test_health_follows_progress(stack: Stack) -> None:
    """A paused worker, while work waits: the gateway is unhealthy, and well again when the worker is."""
    stack.up(worker=1, gateway=1)
    worker, gateway = name_of(stack, "worker"), name_of(stack, "gateway")
    expected = complete(stack.address)
    with streaming(stack.address, num_callers=2) as texts:
        settle(texts)
        assert health(stack, gateway) == health(stack, worker) == "healthy", "busy is not stalled"
        stack.docker("pause", worker)
        try:
            until(lambda: health(stack, gateway) == "unhealthy")
        finally:
            stack.docker("unpause", worker)
        until(lambda: health(stack, gateway) == health(stack, worker) == "healthy")
        settle(texts)
    assert set(texts) == {expected}


def test_a_client_gets_the_rest_of_its_stream_after_its_gateway_died(stack: Stack) -> None:
    stack.up(gateway=2)
    sampling = {"max_tokens": 300, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    request = GenerateRequest(text=PROMPT, sampling=sampling, stream={"return_token_ids": True})
    whole = listen(stack.address, request)
    request.idempotency_key = "compose"
    text, token_ids = listen(stack.address, request, most=5)
    for gateway in stack.containers("gateway"):
        crash(stack, gateway["Name"])
    request.resume.positions.add(num_tokens=len(token_ids), num_chars=len(text))
    rest = until_answered(stack, request)
    assert 0 < len(token_ids) < len(whole[1])
    assert (text + rest[0], token_ids + rest[1]) == whole


def until_answered(stack: Stack, request: Any) -> tuple[str, list[int]]:
    """The client's own patience: it asks again while it gets no answer."""
    deadline = time.monotonic() + 40
    while True:
        try:
            return listen(stack.address, request)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_gateways_find_the_network_of_a_door_that_was_restarted(stack: Stack) -> None:
    expected = complete(stack.address)
    stack.docker("restart", "--time", "1", name_of(stack, "door"))
    gateway = name_of(stack, "gateway")
    restarts = int(stack.inspect(gateway, "{{.RestartCount}}"))
    until(lambda: int(stack.inspect(gateway, "{{.RestartCount}}")) > restarts, seconds=90)
    until(lambda: health(stack, gateway) == "healthy", seconds=90)
    assert complete(stack.address) == expected
