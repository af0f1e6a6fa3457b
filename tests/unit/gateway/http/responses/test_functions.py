"""Functions, reasoning and stored responses of /v1/responses, as the official client reads them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from services.gateway.http.responses.inputs import InputItem
from services.gateway.http.responses.items import sealed
from services.gateway.http.responses.store import ResponseStore, StoredResponse
from shared.errors import RejectCode
from shared.messages import ChatOptions, FinishReason, RequestRejected
from shared.requests.grammar import GrammarKind
from tests.unit.gateway.http.client import Http, http, streaming
from tests.unit.gateway.http.official import PARSERS, answered, openai_client
from tests.unit.gateway.troupe import LAST

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "description": "x", "parameters": PARAMETERS}
SPACE = {"type": "namespace", "name": "agents", "description": "y", "tools": [{"type": "function", "name": "close"}]}
ASK: dict[str, Any] = {"model": "tiny", "input": "Hi"}
THOUGHT = "<think>hm</think>"
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
CLOSE = '<tool_call>{"name": "agents__close", "arguments": {}}</tool_call>'


async def test_items_of_every_kind() -> None:
    async with openai_client() as (h, client):
        asked = client.responses.create(**ASK, tools=[TOOL, SPACE], include=["reasoning.encrypted_content"])
        request, response = await answered(h, asked, THOUGHT + "I look." + CALL + CLOSE)
        assert request.chat_options is not None
        offered = json.loads(request.chat_options.tools)
        assert [one["function"]["name"] for one in offered] == ["weather", "agents__close"]
        assert offered[0]["function"] == {"name": "weather", "description": "x", "parameters": PARAMETERS}
        thought, message, call, other = response.output
        assert (thought.type, thought.content[0].text, thought.encrypted_content) == ("reasoning", "hm", sealed("hm"))
        assert (message.content[0].text, response.output_text) == ("I look.", "I look.")
        assert (call.type, call.name, call.namespace, call.arguments) == (
            "function_call", "weather", None, '{"place": "Oslo"}',
        )  # fmt: skip
        assert (other.name, other.namespace) == ("close", "agents")
        assert call.call_id != other.call_id and len({item.id for item in response.output}) == 4
        assert {item.status for item in response.output} == {"completed"} == {response.status}
        assert response.id == f"resp_{request.header.request_id}"


HISTORY = [
    {"role": "developer", "content": "Be kind."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
     "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"place": "Oslo"}'},
    {"type": "function_call", "call_id": "call_2", "name": "close", "namespace": "agents", "arguments": ""},
    {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "closed"}]},
    {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": sealed("so")},
    {"type": "function_call", "call_id": "call_3", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_3", "output": "sun"},
]  # fmt: skip
SAID = [
    ("system", "Be kind.", "", "", ""),
    ("user", "Weather?", "", "", ""),
    ("assistant", "I look.", "hm", "", ""),
    ("tool", "rain", "", "call_1", "weather"),
    ("tool", "closed", "", "call_2", "agents__close"),
    ("assistant", "", "so", "", ""),
    ("tool", "sun", "", "call_3", "weather"),
]


def said(chat: Any) -> list[tuple[str, ...]]:
    return [(one.role, one.content, one.reasoning, one.tool_call_id, one.name) for one in chat]


async def test_a_history_of_items_is_a_chat() -> None:
    async with openai_client() as (h, client):
        request, _ = await answered(h, client.responses.create(model="tiny", input=HISTORY, tools=[TOOL]), "Rain")
        assert request.chat is not None and said(request.chat) == SAID
        calls = [(call.id, call.name, call.arguments) for one in request.chat for call in one.tool_calls]
        assert calls == [("call_1", "weather", '{"place": "Oslo"}'), ("call_2", "agents__close", "{}"),
                         ("call_3", "weather", "{}")]  # fmt: skip


async def test_errors_name_the_item() -> None:
    async with http(**PARSERS) as h:
        asked = h.post("/v1/responses", {"input": HISTORY, "instructions": "x"})
        request = await h.troupe.request()
        refused = RequestRejected(request.header.request_id, RejectCode.INVALID_ARGUMENT, "chat.messages[6].role is x",
                                  "chat.messages[6].role")  # fmt: skip
        h.troupe.tell(refused)
        assert (await asked).json()["error"]["param"] == "input[8].role"


@pytest.mark.parametrize(("choice", "opening"), [
    ("required", "<tool_call>"), ({"type": "function", "name": "weather"}, "weather"), ("none", ""), ("auto", ""),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}, "<tool_call>"),
])  # fmt: skip
async def test_choices_of_functions(choice: Any, opening: str) -> None:
    async with openai_client() as (h, client):
        other = TOOL | {"name": "other"}
        asked = client.responses.create(**ASK, tools=[TOOL, other], tool_choice=choice)
        request, response = await answered(h, asked, "x")
        options = request.chat_options or ChatOptions()
        assert not options.opening, "the model thinks before"
        grammar = request.params.grammar
        assert (grammar is not None and grammar.kind is GrammarKind.GRAMMAR and opening in grammar.text) is bool(
            opening
        )
        assert (request.params.thinking is not None) is bool(opening)
        assert ("other" in options.tools) is (choice in ("required", "auto") or "name" in choice)
        assert response.tool_choice == choice or response.tool_choice.to_dict() == choice


async def test_one_call_where_only_one_is_wanted() -> None:
    async with openai_client() as (h, client):
        _, response = await answered(
            h, client.responses.create(**ASK, tools=[TOOL], parallel_tool_calls=False), CALL + CALL
        )
        assert len(response.output) == 1 and response.parallel_tool_calls is False


async def test_events_are_in_the_official_order() -> None:
    async with openai_client() as (h, client):

        async def gather() -> list[Any]:
            return [event async for event in await client.responses.create(**ASK, tools=[TOOL], stream=True)]

        _, told = await answered(h, gather(), THOUGHT + "Yes.", CALL)
        assert [event.sequence_number for event in told] == list(range(len(told)))
        assert list(dict.fromkeys((event.type.removeprefix("response."), getattr(event, "output_index", None))
                                  for event in told)) == [
            ("created", None), ("in_progress", None),
            ("output_item.added", 0), ("content_part.added", 0), ("reasoning_text.delta", 0),
            ("reasoning_text.done", 0), ("content_part.done", 0), ("output_item.done", 0),
            ("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1),
            ("output_text.done", 1), ("content_part.done", 1), ("output_item.done", 1),
            ("output_item.added", 2), ("function_call_arguments.delta", 2),
            ("function_call_arguments.done", 2), ("output_item.done", 2),
            ("completed", None),
        ]  # fmt: skip


WRITTEN = ["Yes.", "", THOUGHT, THOUGHT + "Yes.\n\nNo.", "Look." + CALL, CALL + CLOSE, THOUGHT + CALL,
           '<tool_call>{"name": "weather", "arguments": {"place": "Os', "<tool_call>none</tool_call>"]  # fmt: skip


@pytest.mark.parametrize("written", WRITTEN)
async def test_streamed_responses_add_up_to_whole_ones(written: str) -> None:
    """However the text is cut: by the events' own deltas, and by what the official client gathers."""
    drawn = random.Random(written)
    given = ASK | {"tools": [TOOL, SPACE]}
    async with openai_client() as (h, client):
        _, whole = await answered(h, client.responses.create(**given), written)
        for _ in range(6):
            cuts = sorted(drawn.sample(range(len(written) + 1), min(len(written), drawn.randint(0, 9))))
            pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]

            async def gather() -> tuple[list[Any], Any]:
                async with client.responses.stream(**given) as stream:
                    told = [event async for event in stream]
                    return told, await stream.get_final_response()

            _, (told, response) = await answered(h, gather(), *pieces)
            assert stripped(response) == stripped(whole), pieces
            assert grown(told) == [text_of(item) for item in whole.output], pieces


def grown(told: list[Any]) -> list[str]:
    """The text of each item by its deltas."""
    found: dict[int, str] = {event.output_index: "" for event in told if event.type == "response.output_item.added"}
    for event in told:
        if event.type.endswith(".delta"):
            found[event.output_index] += event.delta
    return list(found.values())


def text_of(item: Any) -> str:
    return str(item.arguments) if item.type == "function_call" else str(item.content[0].text)


def stripped(response: Any) -> list[Any]:
    items = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}, exclude_none=True)
             for item in response.output]  # fmt: skip
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return [response.status, *items]


async def test_what_fails_in_the_middle_is_the_last_event() -> None:
    async with openai_client() as (h, client):

        async def gather() -> list[Any]:
            return [event async for event in await client.responses.create(**ASK, stream=True)]

        asked = asyncio.ensure_future(gather())
        request = await h.troupe.request()
        h.troupe.say(request, "Yes ")
        await h.troupe.sent(request)
        refused = RequestRejected(request.header.request_id, RejectCode.INTERNAL, "gone")
        h.troupe.tell(refused)
        last = (await asked)[-1]
        assert (last.type, last.response.status, last.response.error.code) == (
            "response.failed", "failed", "server_error",
        )  # fmt: skip


# -- the store


async def test_a_conversation_goes_on_from_a_stored_response(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"response_ttl": 60, "response_dir": str(tmp_path / "kept")}
    async with openai_client(**kept) as (h, client):
        first = client.responses.create(**ASK, tools=[TOOL], instructions="Be brief.")
        _, one = await answered(h, first, THOUGHT + CALL)
        assert one.store is True
        output = {"type": "function_call_output", "call_id": one.output[1].call_id, "output": "rain"}
        second = client.responses.create(model="tiny", input=[output], previous_response_id=one.id, tools=[TOOL])
        request, two = await answered(h, second, "Rain.")
        assert said(request.chat) == [
            ("user", "Hi", "", "", ""), ("assistant", "", "hm", "", ""),
            ("tool", "rain", "", one.output[1].call_id, "weather"),
        ], "the instructions of before are not"  # fmt: skip
        assert two.previous_response_id == one.id
    async with openai_client(**kept) as (h, client):  # another gateway
        third = client.responses.create(**ASK, previous_response_id=two.id, stream=True, instructions="Be long.")

        async def drained() -> list[Any]:
            return [event async for event in await third]

        request, told = await answered(h, drained(), "Yes")
        assert [one.content for one in request.chat or ()] == ["Be long.", "Hi", "", "rain", "Rain.", "Hi"]
        assert (await client.responses.retrieve(two.id)).to_dict() == two.to_dict()
        last = told[-1].response
        items = await client.responses.input_items.list(last.id, order="asc", limit=3)
        assert [item.type for item in items.data] == ["message", "reasoning", "function_call"] and items.has_more
        rest = await client.responses.input_items.list(last.id, order="asc", after=items.last_id)
        assert [item.type for item in rest.data] == ["function_call_output", "message", "message"]
        await client.responses.delete(two.id)
        await gone(h, two.id)


async def gone(h: Http, response_id: str, **headers: str) -> None:
    found = await h.client.get(f"/v1/responses/{response_id}", headers=headers)
    assert (found.status_code, found.json()["error"]["param"]) == (404, "response_id")
    status, error = await h.refusal("/v1/responses", ASK | {"previous_response_id": response_id}, **headers)
    assert (status, error["param"], error["code"]) == (400, "previous_response_id", "previous_response_not_found")


async def test_what_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    async with openai_client(response_ttl=60, response_dir=str(tmp_path / "kept")) as (h, client):
        _, one = await answered(h, client.responses.create(**ASK, store=False), "Yes")
        assert one.store is False
        await gone(h, one.id)
        _, two = await answered(h, client.responses.create(**ASK), "Yes")
        (file,) = (tmp_path / "kept").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        await gone(h, two.id, **{"x-tenant": "another"})
        file.write_bytes(b"half")
        await gone(h, two.id)
        cancelled = await h.client.post(f"/v1/responses/{two.id}/cancel")
        assert cancelled.status_code == 404


async def test_an_answer_that_cannot_be_stored_is_given_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"")
    async with openai_client(response_ttl=60, response_dir=str(tmp_path / "kept")) as (h, client):
        _, one = await answered(h, client.responses.create(**ASK), "Yes")
        assert (one.output_text, one.store) == ("Yes", False)


async def test_a_running_response_is_read_and_cancelled(tmp_path: Path) -> None:
    async with http(response_ttl=60, response_dir=str(tmp_path)) as h:
        asked = h.post("/v1/responses", streaming({"input": "Hi"}))
        request = await h.troupe.request()
        h.troupe.say(request, "Yes ")
        await h.troupe.sent(request)
        path = f"/v1/responses/resp_{request.header.request_id}"
        assert (await h.client.get(path)).json()["status"] == "in_progress"
        assert (await h.client.post(f"{path}/cancel", headers={"x-tenant": "another"})).status_code == 404
        assert (await h.client.post(f"{path}/cancel")).json()["status"] == "cancelled"
        assert '"status":"cancelled"' in (await asked).text.split("\n\n")[-2]
        answer = h.post("/v1/responses", {"input": "Hi"})
        request = await h.troupe.request()
        h.troupe.say(request, "Yes", **LAST)
        done = (await answer).json()
        refused = await h.client.post(f"/v1/responses/{done['id']}/cancel")
        assert (refused.status_code, "completed" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(("query", "param"), [
    ("?stream=true", "stream"), ("/input_items?order=up", "order"), ("/input_items?limit=0", "limit"),
    ("/input_items?limit=1000", "limit"), ("/input_items?after=x", "after"),
])  # fmt: skip
async def test_what_cannot_be_asked_of_a_stored_response(tmp_path: Path, query: str, param: str) -> None:
    async with openai_client(response_ttl=60, response_dir=str(tmp_path)) as (h, client):
        _, one = await answered(h, client.responses.create(**ASK), "Yes", finish_reason=FinishReason.LENGTH)
        found = await h.client.get(f"/v1/responses/{one.id}{query}")
        assert (found.status_code, found.json()["error"]["param"]) == (400, param)


async def test_old_and_many_responses_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.http.responses.store.SWEEP_SECONDS", -1.0)
    store = ResponseStore(tmp_path, 60.0, 1000)
    import msgspec

    record = StoredResponse(msgspec.Raw(b'{"output": [{"role": "assistant", "content": "' + b"x" * 300 + b'"}]}'), [],
                            [InputItem(role="user", content="Hi")])  # fmt: skip
    for number in range(4):
        store.put("", f"resp_{number}", record)
        await asyncio.sleep(0.02)
    assert [store.get("", f"resp_{number}") is not None for number in range(4)] == [False, False, True, True]
    found = store.get("", "resp_3")
    assert found is not None and [item.role for item in found.conversation] == ["user", "assistant"]
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert store.get("", "resp_3") is None and not store.delete("", "resp_0")


async def test_reasoning_that_is_no_text_is_refused() -> None:
    async with http() as h:
        half = {"type": "reasoning", "encrypted_content": "7aCA"}  # half a surrogate pair
        status, error = await h.refusal("/v1/responses", {"input": [half, {"role": "user", "content": "hi"}]})
        assert (status, error["param"]) == (400, "input[0].encrypted_content")
        assert not len(h.troupe.gateway.generation.journal)
