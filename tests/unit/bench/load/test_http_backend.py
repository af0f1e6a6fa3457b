"""The generator's HTTP side against a server that is not there: what it sends, what it makes of the answers."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import count
from typing import Any

import click
import pytest

from services.cli.bench.generator import RequestOutcome
from shared.metrics import Acceptance, Timeline
from shared.packing import pack_tokens
from shared.workload import ChatPrompt, LoadRequest, Prompt, TextPrompt, TokenPrompt

httpx2 = pytest.importorskip("httpx2", reason="the HTTP client is not installed")

MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 512}]}


def events(*made: dict[str, Any] | str) -> bytes:
    lines = (one if isinstance(one, str) else json.dumps(one) for one in made)
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion,
                                     "prompt_tokens_details": details}}  # fmt: skip


class Server:
    """Answers every generation alike, and remembers what it was asked."""

    def __init__(self, content: bytes = b"", status: int = 200) -> None:
        self.content, self.status = content, status
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, request: Any) -> Any:
        if request.method == "GET":
            return httpx2.Response(200, json=MODELS)
        self.asked.append((request.url.path, json.loads(request.content)))
        return httpx2.Response(self.status, content=self.content)


async def ask(server: Server, prompt: Prompt) -> RequestOutcome:
    from services.cli.bench.http_backend import HttpBackend

    backend = HttpBackend("http://server", {"temperature": 0.0}, transport=httpx2.MockTransport(server))
    ticks = map(float, count(1))
    try:
        served = await backend.model(1.0)
        assert (served.name, served.max_model_len) == ("m", 512) and served.vocab_size > 0
        outcome = RequestOutcome(Timeline(0.0))
        await backend.stream(LoadRequest(prompt, 0, 7), outcome, partial(next, ticks))
        assert await backend.acceptance() == Acceptance()
        return outcome
    finally:
        await backend.close()


async def test_events_with_token_ids_are_outputs_of_so_many_tokens() -> None:
    first = {"choices": [{"index": 0, "text": "He", "token_ids": [1]}]}
    second = {"choices": [{"index": 0, "text": "llo wor", "token_ids": [2, 3, 4]}]}
    silent = {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]}
    server = Server(events(first, second, silent, usage(9, 4, 6), "[DONE]"))
    outcome = await ask(server, TokenPrompt(pack_tokens([5, 6, 7])))
    assert outcome.succeeded and outcome.text == "Hello wor"
    assert outcome.timeline.times == [1.0, 2.0] and outcome.timeline.counts == [1, 3]
    assert (outcome.num_prompt_tokens, outcome.num_cached_tokens, outcome.num_output_tokens) == (9, 6, 4)
    path, body = server.asked[0]
    assert path == "/v1/completions" and body["prompt"] == [5, 6, 7] and body["max_tokens"] == 7
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["temperature"] == 0.0


async def test_without_token_ids_the_usage_says_how_many_tokens_there_were() -> None:
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("", "a", "b")]
    server = Server(events(*chunks, usage(3, 5), "[DONE]"))
    outcome = await ask(server, ChatPrompt("hi"))
    assert outcome.timeline.times == [2.0, 3.0] and outcome.num_output_tokens == 5
    assert server.asked[0][0] == "/v1/chat/completions"
    assert server.asked[0][1]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Server(b'{"error": {"message": "too long"}}', status=400), "400: .*too long"),
        (Server(events({"error": {"message": "worker lost", "code": 500}})), "worker lost"),
        (Server(b"data: {broken\n\n"), "DecodeError"),
        (Server(b""), "^$"),
    ],
)
async def test_failures_are_outcomes(server: Server, said: str) -> None:
    outcome = await ask(server, TextPrompt("x"))
    assert not outcome.succeeded
    assert re.search(said, outcome.error)


async def test_a_server_that_is_not_there_is_named() -> None:
    from services.cli.bench.http_backend import HttpBackend

    backend = HttpBackend("http://127.0.0.1:1", {})
    try:
        with pytest.raises(click.ClickException, match=r"127\.0\.0\.1:1"):
            await backend.model(0.5)
    finally:
        await backend.close()
