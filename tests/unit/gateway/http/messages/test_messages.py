"""/v1/messages as Anthropic's own client reads it: whole, streamed, with tools and thinking; its errors."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from services.gateway.http.messages.reading import KEPT_THINKING
from shared.errors import RejectCode
from shared.messages import ChatOptions, FinishReason, RequestRejected
from shared.requests.grammar import GrammarKind
from tests.unit.gateway.http.client import http
from tests.unit.gateway.http.official import PARSERS, answered, anthropic_client
from tests.unit.gateway.troupe import LAST

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic package")

SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "model": "tiny"}
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
THOUGHT = "<think>hm, let me see</think>"
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo", "days": [1, 2.5]}}</tool_call>'
TALK = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Oslo"}},
        {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no place", "is_error": True},
        {"type": "text", "text": "So?"},
    ]},
]  # fmt: skip


async def test_a_message_and_its_usage() -> None:
    async with anthropic_client() as (h, client):
        more: dict[str, Any] = {"system": "Be brief.", "stop_sequences": ["END"], "extra_body": {"temperature": 0.5}}
        request, message = await answered(h, client.messages.create(**SAY, **more), "Ye", "s", num_cached_tokens=2)
        assert [(one.role, one.content) for one in request.chat or ()] == [("system", "Be brief."), ("user", "Hi")]
        params = request.params
        assert (params.max_tokens, params.stop, params.temperature) == (50, ["END"], 0.5)
        assert [(block.type, block.text) for block in message.content] == [("text", "Yes")]
        assert (message.role, message.model, message.type) == ("assistant", "tiny", "message")
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (1, 2, 0)
        assert usage.output_tokens == 2 and message.id == f"msg_{request.header.request_id}"
        assert message._request_id == request.header.request_id


async def test_a_conversation_with_tools_is_that_of_a_chat() -> None:
    async with anthropic_client() as (h, client):
        asked = client.messages.create(**(SAY | {"messages": TALK}), tools=[TOOL])
        request, _ = await answered(h, asked, "Rain")
        assert request.chat is not None and request.chat_options is not None
        said = [(one.role, one.content, one.reasoning, one.tool_call_id, one.name) for one in request.chat]
        assert said == [
            ("user", "Weather?", "", "", ""),
            ("assistant", "I look.", "hm", "", ""),
            ("tool", "rain", "", "toolu_1", "weather"),
            ("tool", "Error: no place", "", "toolu_2", "weather"),
            ("user", "So?", "", "", ""),
        ]
        calls = request.chat[1].tool_calls
        assert [(call.id, call.name, json.loads(call.arguments)) for call in calls] == [
            ("toolu_1", "weather", {"place": "Oslo"}), ("toolu_2", "weather", {}),
        ]  # fmt: skip
        function = {"name": "weather", "description": "The weather", "parameters": TOOL["input_schema"]}
        assert json.loads(request.chat_options.tools) == [{"type": "function", "function": function}]


async def test_blocks_whole() -> None:
    async with anthropic_client() as (h, client):
        _, message = await answered(h, client.messages.create(**SAY, tools=[TOOL]), THOUGHT + "I look." + CALL)
        thinking, text, use = message.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "hm, let me see", "I look.")
        assert thinking.signature and use.id.startswith("toolu_")
        assert (use.name, use.input) == ("weather", {"place": "Oslo", "days": [1, 2.5]})
        assert message.stop_reason == "tool_use"


async def test_events_are_in_the_official_order() -> None:
    async with http(**PARSERS) as h:
        tools = [TOOL]
        asked = h.post("/v1/messages", SAY | {"stream": True, "tools": tools})
        request = await h.troupe.request()
        h.troupe.say(request, THOUGHT + "Yes." + CALL, **(LAST | {"token_ids": [1, 2]}))
        blocks = [block.split("\n") for block in (await asked).text.split("\n\n") if block]
        told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
        assert [f"event: {event['type']}" for event in told] == [name for name, _ in blocks]
        short = [event["type"] + str(event.get("index", "")) for event in told]
        assert list(dict.fromkeys(short)) == [
            "message_start", "ping",
            "content_block_start0", "content_block_delta0", "content_block_stop0",
            "content_block_start1", "content_block_delta1", "content_block_stop1",
            "content_block_start2", "content_block_delta2", "content_block_stop2",
            "message_delta", "message_stop",
        ]  # fmt: skip
        assert told[0]["message"]["content"] == [] and told[0]["message"]["usage"]["input_tokens"] == 2
        assert [event["delta"]["type"] for event in told if event.get("index") == 0 and "delta" in event] == [
            "thinking_delta", "signature_delta",
        ]  # fmt: skip
        assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


WRITTEN = [
    "Yes.",
    "",
    THOUGHT,
    THOUGHT + "Yes, of course.\n\nNo.",
    "Let me look." + CALL,
    CALL + CALL,
    THOUGHT + CALL,
    '<tool_call>{"name": "weather", "arguments": {"place": "a \\"b\\" \\u00e9 \U0001f98a"}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"place": "Os',
    '<tool_call>{"name": "weather", "arguments": {"a": {"b": [1, tr',
    "<tool_call>no call</tool_call>",
]


@pytest.mark.parametrize("written", WRITTEN)
async def test_streamed_messages_add_up_to_whole_ones(written: str) -> None:
    """However the text is cut, what the official client gathers is the whole message."""
    drawn = random.Random(written)
    async with anthropic_client() as (h, client):
        _, whole = await answered(h, client.messages.create(**SAY, tools=[TOOL]), written)
        for _ in range(8):
            cuts = sorted(drawn.sample(range(len(written) + 1), min(len(written), drawn.randint(0, 9))))
            pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]

            async def gather() -> Any:
                async with client.messages.stream(**SAY, tools=[TOOL]) as stream:
                    return await stream.get_final_message()

            _, message = await answered(h, gather(), *pieces)
            assert stripped(message) == stripped(whole), pieces


def stripped(message: Any) -> Any:
    """Without what differs between any two answers."""
    found = message.model_dump(exclude={"id", "usage", "parsed_output"}, exclude_none=True)
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


@pytest.mark.parametrize(("end", "reasons"), [
    ({"finish_reason": FinishReason.LENGTH}, ("model_context_window_exceeded", None)),
    ({"finish_reason": FinishReason.STOP, "stop_reason": "END"}, ("stop_sequence", "END")),
])  # fmt: skip
async def test_why_an_answer_ended(end: dict[str, Any], reasons: tuple[str, str | None]) -> None:
    async with anthropic_client() as (h, client):
        _, message = await answered(h, client.messages.create(**SAY, stop_sequences=["END"]), "Yes", **end)
        assert (message.stop_reason, message.stop_sequence) == reasons
        _, message = await answered(h, client.messages.create(**(SAY | {"max_tokens": 1})), "Yes",
                                    finish_reason=FinishReason.LENGTH)  # fmt: skip
        assert message.stop_reason == "max_tokens"


async def test_choices_of_tools() -> None:
    async with anthropic_client() as (h, client):
        for choice, opening in (({"type": "any"}, "<tool_call>"), ({"type": "tool", "name": "weather"}, "<tool_call>")):
            asked = client.messages.create(**SAY, tools=[TOOL], tool_choice=choice)
            rest = '{"place": "Oslo"}}</tool_call>'
            written = rest if "name" in choice else '"weather", "arguments": ' + rest
            request, message = await answered(h, asked, written)
            assert request.chat_options is not None and request.chat_options.opening.startswith(opening)
            assert request.params.grammar is not None and request.params.grammar.kind is GrammarKind.GRAMMAR
            assert (message.content[0].input, message.stop_reason) == ({"place": "Oslo"}, "tool_use")
        asked = client.messages.create(**SAY, tools=[TOOL], tool_choice={"type": "none"})
        request, message = await answered(h, asked, CALL)
        assert request.chat_options == ChatOptions() and message.content[0].text == CALL
        alone = {"type": "auto", "disable_parallel_tool_use": True}
        _, message = await answered(h, client.messages.create(**SAY, tools=[TOOL], tool_choice=alone), CALL + CALL)
        assert len(message.content) == 1


async def test_thinking_and_effort_reach_the_template() -> None:
    async with anthropic_client() as (h, client):
        for thinking, value in (({"type": "adaptive"}, True), ({"type": "disabled"}, False),
                                ({"type": "enabled", "budget_tokens": 1024}, True)):  # fmt: skip
            asked = client.messages.create(**SAY, thinking=thinking, output_config={"effort": "low"})
            request, _ = await answered(h, asked, "Yes")
            assert request.chat_options is not None
            found = json.loads(request.chat_options.template_args)
            assert found == {"enable_thinking": value, "thinking": value, "reasoning_effort": "low"}
        hidden = {"type": "adaptive", "display": "omitted"}
        _, message = await answered(h, client.messages.create(**SAY, thinking=hidden), THOUGHT + "Yes")
        assert [block.type for block in message.content] == ["text"]


async def test_a_format_holds_the_answer() -> None:
    async with anthropic_client() as (h, client):
        form = {"type": "json_schema", "schema": {"type": "object"}}
        for more in ({"output_config": {"format": form}}, {"extra_body": {"output_format": form}}):
            request, _ = await answered(h, client.messages.create(**SAY, **more), "{}")
            assert request.params.grammar is not None and request.params.grammar.kind is GrammarKind.JSON_SCHEMA


async def test_the_last_words_of_an_assistant_are_gone_on_with() -> None:
    async with anthropic_client() as (h, client):
        talk = [*SAY["messages"], {"role": "assistant", "content": "Once"}]
        request, message = await answered(h, client.messages.create(**(SAY | {"messages": talk})), " upon")
        options = request.chat_options
        assert options is not None and options.continue_final_message and not options.add_generation_prompt
        assert message.content[0].text == " upon"


async def test_what_claude_code_sends_is_read() -> None:
    """A changing line about billing would make every prompt's beginning another one; it is not for the model."""
    async with anthropic_client() as (h, client):
        system = [{"type": "text", "text": "x-anthropic-billing-header: cc=1;"}, {"type": "text", "text": "Be kind."}]
        messages = [*SAY["messages"], {"role": "system", "content": "There are agents."}]
        more = {"context_management": {"edits": [KEPT_THINKING]}, "metadata": {"user_id": "x"}}
        asked = client.messages.create(**(SAY | {"messages": messages}), system=system, extra_body=more)
        request, _ = await answered(h, asked, "Yes")
        assert [(one.role, one.content) for one in request.chat or ()] == [
            ("system", "Be kind."), ("user", "Hi"), ("system", "There are agents."),
        ]  # fmt: skip


async def test_tokens_are_counted() -> None:
    async with anthropic_client() as (h, client):
        import asyncio

        asked = asyncio.ensure_future(
            client.messages.count_tokens(model="tiny", messages=SAY["messages"], system="Be brief.", tools=[TOOL])
        )
        question = await h.answer_encode([1, 2, 3, 4])
        assert (await asked).input_tokens == 4
        assert [one.role for one in question.chat or ()] == ["system", "user"]
        assert question.chat_options is not None and "weather" in question.chat_options.tools


async def test_errors_are_the_client_s_own() -> None:
    async with anthropic_client() as (h, client):
        asking = asyncio.create_task(h.troupe.request())  # the tags of reasoning are asked for first
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**SAY, tools=[{"type": "web_search_20250305", "name": "web_search"}])
        body = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**(SAY | {"model": "claude"}))
        with pytest.raises(anthropic.BadRequestError, match="anthropic-version"):
            await client.messages.create(**SAY, extra_headers={"anthropic-version": "2020-01-01"})
        response = await h.client.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"})
        assert (response.status_code, response.json()["type"]) == (415, "error")
        response = await h.client.get("/v1/messages/x")
        assert response.json()["error"]["type"] == "not_found_error"
        asking.cancel()


async def test_a_refusal_of_the_troupe_names_the_client_s_message() -> None:
    async with http(**PARSERS) as h:
        asked = h.post("/v1/messages", SAY | {"messages": TALK, "system": "Be kind"})
        request = await h.troupe.request()
        request_id = request.header.request_id
        for_ = RequestRejected(request_id, RejectCode.INVALID_ARGUMENT, "chat.messages[4].content is x",
                               "chat.messages[4].content")  # fmt: skip
        h.troupe.tell(for_)
        error = (await asked).json()["error"]
        assert (error["param"], error["message"]) == ("messages[2].content", "messages[2].content is x")


async def test_what_fails_in_the_middle_is_an_event() -> None:
    async with anthropic_client() as (h, client):
        import asyncio

        async def gather() -> Any:
            async with client.messages.stream(**SAY) as stream:
                return await stream.get_final_message()

        asked = asyncio.ensure_future(gather())
        request = await h.troupe.request()
        h.troupe.say(request, "Yes ")
        await h.troupe.sent(request)
        stream = h.troupe.gateway.generation.journal.get(request.header.request_id)
        assert stream is not None
        from shared.errors import RequestError

        stream.fail(RequestError("gone", code=RejectCode.UNAVAILABLE))
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            await asked


async def test_keys_are_asked_for_as_everywhere() -> None:
    async with anthropic_client(api_keys="mine:secret-of-mine") as (h, client):
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**SAY)
        client.api_key = "secret-of-mine"  # as x-api-key
        request, _ = await answered(h, client.messages.create(**SAY), "Yes")
        assert request.header.tenant == "mine"
