"""Clients that come back over HTTP with their key: to which request, with which ids, and behind what they have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.http.requests.returning import Bookmark, Rest
from services.gateway.streams.stream import Position, StreamDelta
from shared.errors import RejectCode
from shared.messages import AbortRequest, AttachRequest, RequestHeader, RequestRejected, TokenizeRequest
from shared.requests.sampling import SamplingParams
from tests.unit.gateway.http.client import Http, http, streaming
from tests.unit.gateway.troupe import LAST

ASK: dict[str, Any] = {"prompt": "Once", "max_tokens": 9}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ANSWER = '<think>hm so</think>It is <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
KEY = {"idempotency-key": "k1"}


def blocks(text: str) -> list[tuple[str, Any]]:
    """Events with their ids, those without one too, and without the last that says that it is."""
    found = []
    for block in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines["data"] != "[DONE]":
            found.append((lines.get("id", ""), json.loads(lines["data"])))
    return found


async def attached(h: Http) -> TokenizeRequest:
    """What a client that came back has asked for, as far as the troupe has to know."""
    attach = await h.troupe.get(h.troupe.scheduler, AttachRequest)
    assert attach.gateway == h.troupe.gateway.inbox.address
    return TokenizeRequest(RequestHeader(attach.request_id, attach.gateway), SamplingParams())


async def test_a_key_fixes_id_and_seed_of_every_prompt_for_its_tenant() -> None:
    async with http() as h:
        seen: dict[tuple[str, str], Any] = {}
        for tenant, key in (("a", "k1"), ("a", "k1"), ("a", "k2"), ("b", "k1")):
            asked = h.post(
                "/v1/completions", ASK | {"prompt": ["x", "y"]}, **{"x-tenant": tenant, "idempotency-key": key}
            )
            requests = [await h.troupe.request() for _ in range(2)]
            requests.sort(key=lambda request: request.text or "")
            for request in requests:
                assert request.header.is_kept
                h.troupe.say(request, "one", **LAST)
            await asked
            for _ in range(2):
                await h.troupe.asked(AbortRequest)
            ids = [(request.header.request_id, request.params.seed) for request in requests]
            assert seen.setdefault((tenant, key), ids) == ids
        assert len({pair for ids in seen.values() for pair in ids}) == 6


async def test_events_of_an_answer_without_a_key_have_no_ids() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", streaming(ASK))
        request = await h.troupe.request()
        assert not request.header.is_kept
        h.troupe.say(request, "one", **LAST)
        assert "id:" not in (await asked).text


async def test_a_completion_goes_on_behind_the_last_event_that_its_client_has() -> None:
    async with http() as h:
        body = streaming(ASK | {"prompt": [5, 6], "n": 2, "return_token_ids": True})
        asked = h.post("/v1/completions", body, **KEY)
        request = await h.troupe.request()
        h.troupe.say(request, "one two", token_ids=[1, 2])
        await h.troupe.sent(request)
        h.troupe.say(request, "eins", index=1, token_ids=[3])
        await h.troupe.sent(request)
        h.troupe.say(request, " three", at=(2, 7), token_ids=[7], **LAST)
        h.troupe.say(request, " zwei", at=(1, 4), index=1, token_ids=[8], **LAST)
        whole = blocks((await asked).text)
        assert whole[-1][0] == "3.13,2.9"
        for place, (name, _) in enumerate(whole):
            again = h.post("/v1/completions", body, **KEY, **has(name))
            request = await attached(h)
            for index, text, ids in ((0, "one two three", [1, 2, 7]), (1, "eins zwei", [3, 8])):
                h.troupe.say(request, text, index=index, token_ids=ids, **LAST)
            rest = blocks((await again).text)
            for index in range(2):
                assert said([*whole[: place + 1], *rest], index) == said(whole, index)
            assert rest[-1][0] == whole[-1][0]


def has(name: str) -> dict[str, str]:
    return {"last-event-id": name}


def said(found: list[tuple[str, Any]], index: int) -> tuple[str, list[int]]:
    choices = [choice for _, event in found for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] for choice in choices), [i for choice in choices for i in choice["token_ids"]]


async def test_an_echo_is_not_said_again() -> None:
    async with http() as h:
        again = h.post("/v1/completions", streaming(ASK | {"echo": True}), **KEY, **has("1.3"))
        h.troupe.say(await attached(h), "one two", **LAST)
        assert "".join(event["choices"][0]["text"] for _, event in blocks((await again).text)) == " two"


def message(found: list[tuple[str, Any]]) -> dict[str, Any]:
    """What the deltas add up to; ids of calls are made when they begin, so only their number is kept."""
    total: dict[str, Any] = {"role": "", "content": "", "reasoning_content": "", "calls": [], "finish": None}
    for _, event in found:
        (choice,) = event["choices"]
        delta = choice["delta"]
        for name in ("role", "content", "reasoning_content"):
            total[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                total["calls"].append([call["function"]["name"], ""])
            total["calls"][call["index"]][1] += call["function"].get("arguments") or ""
        total["finish"] = choice["finish_reason"] or total["finish"]
    return total


@pytest.mark.parametrize("step", [4, 7])
async def test_a_chat_goes_on_in_the_middle_of_thoughts_and_calls(step: int) -> None:
    async with http(tool_call_parser="hermes", reasoning_parser="qwen3") as h:
        body = streaming(CHAT | {"tools": [TOOL]})
        asked = h.post("/v1/chat/completions", body, **KEY)
        request = await h.troupe.request()
        for token, start in enumerate(range(0, len(ANSWER), step)):
            last = LAST if start + step >= len(ANSWER) else {}
            h.troupe.say(request, ANSWER[start : start + step], at=(token, start), token_ids=[token], **last)
            if not last:
                await h.troupe.sent(request)
        whole = blocks((await asked).text)
        names = [name for name, _ in whole if name]
        assert len(names) > 3 and message(whole)["calls"] == [["weather", '{"city": "Rome"}']]
        for name in names[:: max(1, len(names) // 6)]:
            place = [found for found, _ in whole].index(name)
            again = h.post("/v1/chat/completions", body, **KEY, **has(name))
            num_tokens = -(-len(ANSWER) // step)
            h.troupe.say(await attached(h), ANSWER, token_ids=list(range(num_tokens)), **LAST)
            rest = blocks((await again).text)
            assert message([*whole[: place + 1], *rest]) == message(whole)
            assert rest[-1][0] == names[-1]


async def test_a_whole_answer_is_told_again() -> None:
    async with http() as h:
        for _ in range(2):
            asked = h.post("/v1/chat/completions", CHAT, **KEY)
            request = await h.troupe.request()
            assert request.header.is_kept
            h.troupe.say(request, "one two", **LAST)
            assert (await asked).json()["choices"][0]["message"]["content"] == "one two"
            await h.troupe.asked(AbortRequest)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
async def test_who_comes_back_too_late_is_told_so(path: str, body: dict[str, Any]) -> None:
    async with http() as h:
        asked = h.post(path, streaming(body), **KEY, **has("2.9"))
        request = await attached(h)
        h.troupe.tell(
            RequestRejected(
                request.header.request_id, RejectCode.NOT_FOUND, "no such request is kept", "idempotency_key"
            )
        )
        response = await asked
        assert response.status_code == 404
        assert response.json()["error"]["param"] == "idempotency-key" and "kept" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"idempotency-key": "k" * 257}, "idempotency-key"),
        ({"last-event-id": "1.2"}, "idempotency-key"),
        (KEY | {"last-event-id": "1.2,3.4"}, "last-event-id"),
        (KEY | {"last-event-id": "-1.2"}, "last-event-id"),
        (KEY | {"last-event-id": "12"}, "last-event-id"),
        (KEY | {"last-event-id": "9999999999.1"}, "last-event-id"),
        (KEY | {"last-event-id": ""}, "last-event-id"),
    ],
)
async def test_a_return_that_makes_no_sense_is_refused(headers: dict[str, str], field: str) -> None:
    async with http() as h:
        for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
            status, error = await h.refusal(path, streaming(body), **headers)
            assert (status, error["param"]) == (400, field)


async def test_a_response_is_told_from_its_start_only() -> None:
    async with http() as h:
        status, error = await h.refusal("/v1/responses", streaming({"input": "Hi"}), **KEY, **has("1.2"))
        assert (status, error["param"]) == (400, "last-event-id")


def test_a_bookmark_counts_what_is_in_the_events() -> None:
    bookmark = Bookmark(2, [Position(1, 4), Position()], is_kept=True)
    bookmark.add(1, StreamDelta(1, ["ab", "c"], [5]))
    assert bookmark.line == b"id: 1.4,1.3\n"
    assert Bookmark(1, None, is_kept=False).line == b""


def test_tokens_and_characters_need_not_end_together() -> None:
    rest = Rest(Position(2, 3))
    had, new = rest.split(StreamDelta(0, ["ab"], [1, 2, 3]))
    assert had is not None and (had.text, had.token_ids) == (["ab"], [1, 2])
    assert new is not None and (new.text, new.token_ids) == ([""], [3])
    had, new = rest.split(StreamDelta(0, ["cd"], []))
    assert had is not None and new is not None and (had.text, new.text) == (["c"], ["d"])
    last = StreamDelta(0, ["e"], [4])
    assert rest.split(last) == (None, last)
