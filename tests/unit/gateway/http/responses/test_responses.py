"""/v1/responses over a real HTTP server, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

from shared.messages import (
    FinishReason,
)
from shared.packing import unpack_tokens
from tests.unit.gateway.http.client import http, streaming
from tests.unit.gateway.troupe import LAST

CUT: dict[str, Any] = {"finish_reason": FinishReason.LENGTH}


async def test_a_response_and_its_usage() -> None:
    async with http(reasoning_parser="qwen3") as h:
        body = {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 9, "reasoning": {"effort": "low"}}
        asked = h.post("/v1/responses", body)
        request = await h.troupe.request()
        assert request.chat is not None and request.params.max_tokens == 9
        assert [(m.role, m.content) for m in request.chat] == [("system", "Be brief."), ("user", "Hi")]
        h.troupe.say(request, "<think>hm</think>Yes", **LAST)
        answer = (await asked).json()
        assert [(item["type"], item["content"][0]["text"]) for item in answer["output"]] == [
            ("reasoning", "hm"), ("message", "Yes"),
        ]  # fmt: skip
        assert (answer["status"], answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (
            "completed",
            3,
            1,
        )


async def test_a_response_grows_by_numbered_events() -> None:
    async with http() as h:
        items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
        asked = h.post("/v1/responses", streaming({"input": items}))
        request = await h.troupe.request()
        h.troupe.say(request, "Yes ")
        h.troupe.say(request, "no", at=(1, 4), **CUT)
        blocks = [block.split("\n") for block in (await asked).text.split("\n\n") if block]
        told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
        assert [f"event: {event['type']}" for event in told] == [name for name, _ in blocks]
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        deltas = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
        last = told[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert deltas == last["response"]["output"][0]["content"][0]["text"] == "Yes no"


async def test_a_response_with_all_its_tokens() -> None:
    async with http() as h:
        asked = h.post("/v1/responses", {"input": "Hi", "enable_response_messages": True})
        await h.answer_encode([4, 5])
        request = await h.troupe.request()
        assert unpack_tokens(request.token_ids or b"") == [4, 5] and request.params.max_tokens == 512 - 2
        h.troupe.say(request, "Yes", token_ids=[7, 9], **LAST)
        for ids, text in (([4, 5], "<user>Hi"), ([7, 9], "Yes<end>")):
            question = await h.answer_decode(text)
            assert unpack_tokens(question.token_ids) == ids and not question.skip_special_tokens
        answer = (await asked).json()
        assert answer["input_messages"] == [{"type": "raw_message_tokens", "message": "<user>Hi", "tokens": [4, 5]}]
        assert answer["output_messages"] == [{"type": "raw_message_tokens", "message": "Yes<end>", "tokens": [7, 9]}]
