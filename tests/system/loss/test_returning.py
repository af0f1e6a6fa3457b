"""Clients that lose their connection, or their gateway, and come back over HTTP for the rest."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.system.harness import Troupe, troupe

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time", "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A story about a fox"}]},
}
SAMPLING = {"max_tokens": 150, "seed": 3, "temperature": 0.8, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    with troupe(tmp_path_factory.mktemp("returning"), "--num-blocks", "256", "--num-threads", "1") as started:
        yield started


class Reader:
    """What one client has heard of one answer, over as many connections as it took."""

    def __init__(self, running: Troupe, path: str, key: str = "") -> None:
        self._running = running
        self._path = path
        self._key = key
        self.last_id = ""
        self.texts: dict[int, str] = {}
        self.is_done = False

    def read(self, num_events: int = 0) -> None:
        """So many events, or all; then the connection is closed."""
        headers = {"idempotency-key": self._key} if self._key else {}
        if self.last_id:
            headers["last-event-id"] = self.last_id
        url = f"{self._running.url}{self._path}"
        body = BODIES[self._path] | SAMPLING
        with (
            httpx2.Client(timeout=60, trust_env=False) as client,
            client.stream("POST", url, json=body, headers=headers) as response,
        ):
            assert response.status_code == 200, response.read()
            for count, block in enumerate(_blocks(response)):
                self._take(block)
                if count + 1 == num_events:
                    return

    def read_on(self) -> None:
        """To the end, while there may be no gateway."""
        deadline = time.monotonic() + 30
        while not self.is_done:
            try:
                self.read()
            except (httpx2.TransportError, AssertionError):
                assert time.monotonic() < deadline
                time.sleep(0.2)

    def _take(self, block: dict[str, str]) -> None:
        self.last_id = block.get("id", self.last_id)
        if block["data"] == "[DONE]":
            self.is_done = True
            return
        for choice in json.loads(block["data"])["choices"]:
            said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + said


def _blocks(response: Any) -> Iterator[dict[str, str]]:
    block: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            block[name] = value
        elif block:
            yield block
            block = {}


def undisturbed(running: Troupe, path: str) -> dict[int, str]:
    reader = Reader(running, path)
    reader.read()
    assert reader.is_done and not reader.last_id
    return reader.texts


@pytest.mark.parametrize("path", BODIES)
def test_who_comes_back_again_and_again_hears_everything_once(running: Troupe, path: str) -> None:
    reader = Reader(running, path, f"again {path}")
    for _ in range(5):
        reader.read(4)
    reader.read()
    assert reader.is_done and reader.texts == undisturbed(running, path)
    assert running.settled_load().num_running == 0


@pytest.mark.parametrize("path", BODIES)
def test_another_gateway_has_the_rest_when_the_first_is_killed(running: Troupe, path: str) -> None:
    reader = Reader(running, path, f"killed {path}")
    reader.read(4)
    running.kill("gateway", signal.SIGKILL)
    reader.read_on()
    assert reader.texts == undisturbed(running, path)


def test_nothing_is_kept_under_a_key_that_nobody_used(running: Troupe) -> None:
    running.until_serving()
    headers = {"idempotency-key": "never", "last-event-id": "3.9"}
    body = BODIES["/v1/completions"] | SAMPLING
    response = httpx2.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=30, trust_env=False)
    assert response.status_code == 404 and response.json()["error"]["param"] == "idempotency-key"
