"""Bodies of Responses and Messages with something odd in some place of them end in an answer or a refusal, never in a
defect."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from shared.messages import EncodeRequest, EncodeResult, TokenizeRequest
from shared.packing import pack_tokens
from shared.transport import Inbox
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.http.official import PARSERS
from tests.unit.gateway.troupe import LAST

NUM_BODIES = int(os.environ.get("PAGEANT_TEST_FRAMES", "400"))
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
RESPONSES: dict[str, Any] = {
    "model": "tiny", "instructions": "Be kind.", "max_output_tokens": 9, "temperature": 0.5, "store": False,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "encrypted_content": "aG0="},
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True},
              {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "include": ["reasoning.encrypted_content"], "parallel_tool_calls": False, "previous_response_id": None,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "stream": False,
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "tiny", "max_tokens": 9, "system": [{"type": "text", "text": "Be kind."}], "stream": False,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"place": "Oslo"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": [{"type": "text", "text": "x"}]},
        ]},
        {"role": "user", "content": "So?"},
    ],
    "tools": [{"name": "f", "description": "x", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
    "output_config": {"effort": "low"}, "stop_sequences": ["END"], "temperature": 0.5, "top_k": 3,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip
ODD: list[Any] = [
    None, True, 0, -1, 2**63, 1.5, "", "x", "\x00", "\ud83e", "a" * 5000, [], {}, [[]], [None], {"type": "x"},
    {"": None}, "image", "function_call", "tool_use", "required", "any", [{"type": "text", "text": "x"}],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def spoilt(body: dict[str, Any], drawn: random.Random) -> dict[str, Any]:
    """With one to three things changed, left out, or doubled."""
    body = copy.deepcopy(body)
    for _ in range(drawn.randint(1, 3)):
        path = drawn.choice(list(places(body)))
        holder: Any = body
        for key in path[:-1]:
            holder = holder[key]
        match drawn.randrange(4):
            case 0:
                del holder[path[-1]]
            case 1 if isinstance(holder, list):
                holder.append(copy.deepcopy(drawn.choice(holder)))
            case _:
                holder[path[-1]] = copy.deepcopy(drawn.choice(ODD))
    return body


async def answer_all(h: Http, inbox: Inbox[Any]) -> None:
    while True:
        for message in await inbox.recv_batch():
            h.troupe.tells_ids(message)
            if isinstance(message, EncodeRequest):
                h.troupe.tell(EncodeResult(message.request_id, pack_tokens([1, 2])))
            if isinstance(message, TokenizeRequest):
                h.troupe.say(message, '<think>a</think>{"place": "x', **(LAST | {"token_ids": [7]}))


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES), ("/v1/messages/count_tokens", MESSAGES),
])  # fmt: skip
async def test_nothing_odd_is_a_defect(path: str, body: dict[str, Any]) -> None:
    drawn, statuses = random.Random(path), []
    async with http(**PARSERS) as h:
        answering = [asyncio.create_task(answer_all(h, inbox)) for inbox in h.troupe.tokenizers.values()]
        for number in range(NUM_BODIES):
            sent = body if number == 0 else spoilt(body, drawn)
            response = await h.post(path, json.dumps(sent).encode())
            statuses.append(response.status_code)
            assert response.status_code in (200, 400, 404), (sent, response.text)
            if response.status_code != 200:
                error = response.json()["error"]
                assert error["message"] and (error["param"] is None or isinstance(error["param"], str)), sent
            elif sent.get("stream") is True:
                assert "event: " in response.text
        for task in answering:
            task.cancel()
        assert not len(h.troupe.gateway.generation.journal)
    assert statuses[0] == 200 and 0.1 < statuses.count(200) / len(statuses) < 0.9
