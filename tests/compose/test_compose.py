"""The containers as a user meets them: up, a stream from the host, replicas that come and go, logs, down."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from scripts.bench.common.stack import SERVICES, Stack
from tests.compose.stack import KEYS_ADVISED, running_stack
from tests.compose.streams import PROMPT, complete, settle, streaming

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

FRONT_MEGABYTES = 300
MANY = {"tokenizer": 3, "detokenizer": 3, "worker": 2, "draft": 2, "gateway": 2}
NUM_CALLERS = 16  # so many that chance alone does not keep a newcomer without work for long
DOOR = "door"  # keeps the published ports, and has no health of its own


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("compose")) as started:
        yield started


def test_only_the_gateway_can_be_reached(stack: Stack) -> None:
    found = stack.containers()
    assert sorted(one["Service"] for one in found) == sorted((*SERVICES, DOOR))
    assert {one["Health"] for one in found if one["Service"] != DOOR} == {"healthy"}
    published = {
        (one["Service"], port["URL"], port["TargetPort"]): port["PublishedPort"]
        for one in found
        for port in one["Publishers"] or ()
        if port["PublishedPort"]
    }
    assert set(published) == {(DOOR, "127.0.0.1", 50051), (DOOR, "127.0.0.1", 8000)}
    assert published[DOOR, "127.0.0.1", 50051] == int(stack.address.split(":")[1])


def test_the_front_is_small_and_nobody_has_rights(stack: Stack) -> None:
    for service in SERVICES:
        assert stack.run_in(service, "id", "-u") == "1000"
        assert stack.run_in(service, "sh", "-c", "touch /app/x 2>/dev/null || echo refused") == "refused"
        assert stack.run_in(service, "sh", "-c", "command -v cc gcc g++ clang || echo none") == "none"
        assert int(stack.run_in(service, "awk", "/^CapEff/ {print $2}", "/proc/1/status"), 16) == 0
    sizes = stack.run_in("gateway", "du", "-sm", "/opt/venv", "/app").splitlines()
    assert sum(int(line.split()[0]) for line in sizes) < FRONT_MEGABYTES
    assert stack.run_in("gateway", "find", "/opt/venv", "-maxdepth", "5", "-name", "torch") == ""


def test_replicas_come_and_go_while_requests_stream(stack: Stack) -> None:
    expected = complete(stack.address)
    seen: list[dict[str, Any]] = []
    with streaming(stack.address, NUM_CALLERS) as texts:
        begun = time.time()
        stack.up(**MANY)
        settle(texts)
        read = time.time()
        seen += stack.logs()  # while the containers that are about to go are still there
        stack.up(**dict.fromkeys(MANY, 1))
        settle(texts)
    followed = by_request(seen, read)
    assert len(followed) > 4
    for about in followed.values():
        check_joinable(about)
    seen += stack.logs()
    assert len(texts) > 10
    assert set(texts) == {expected}, "greedy text depends on the prompt alone, whichever services come and go"
    for service, count in MANY.items():
        names = {line["instance"] for line in seen if line.get("service") == service and line["event"] == "ready"}
        assert len(names) == count
    used = {line["worker"] for line in seen if line["event"] == "sequence_scheduled"}
    assert len(used) == 2, "both workers had work"
    took = {line["instance"] for line in seen if line["event"] == "request_received"}
    assert len(took) == 2, "both gateways had calls, at the one port"
    for name, seconds in spread(seen, begun):
        print(f"{name}: {seconds:.2f} s from ready to its first request")


def by_request(lines: list[dict[str, Any]], until: float) -> dict[str, list[dict[str, Any]]]:
    """The lines of each request that ended before a time: logs of several containers are read one after another."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if "request_id" in line:
            found[line["request_id"]].append(line)
    return {
        request_id: about
        for request_id, about in found.items()
        if any(line["event"] == "request_finished" and stamp(line) < until for line in about)
    }


def spread(lines: list[dict[str, Any]], since: float) -> Iterator[tuple[str, float]]:
    """Of every instance that came since then and had work: how long after it was ready its first request arrived."""
    arrived = {line["request_id"]: stamp(line) for line in lines if line["event"] == "request_received"}
    for instance in sorted({line["instance"] for line in lines if line["event"] == "ready" and stamp(line) > since}):
        own = [line for line in lines if line["instance"] == instance]
        ready = min(stamp(line) for line in own if line["event"] == "ready")
        asked = [arrived[line["request_id"]] - ready for line in own if line.get("request_id") in arrived]
        if after := [seconds for seconds in asked if seconds >= 0]:
            yield instance, min(after)


def stamp(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def check_joinable(about: list[dict[str, Any]]) -> None:
    assert {line["service"] for line in about} >= {"gateway", "tokenizer", "scheduler"}
    assert len({line["trace_id"] for line in about}) == 1
    assert all(line["trace_id"] for line in about)


def test_the_logs_are_clean(stack: Stack) -> None:
    complete(stack.address, fewest_pieces=10)
    lines = stack.logs()
    assert {line["service"] for line in lines} == set(SERVICES)
    loud = [line for line in lines if line["level"] not in ("debug", "info")]
    assert {line["event"] for line in loud} <= {KEYS_ADVISED}
    assert PROMPT not in str(lines)
    check_joinable(
        max(by_request(lines, time.time()).values(), key=lambda about: max(line["timestamp"] for line in about))
    )
