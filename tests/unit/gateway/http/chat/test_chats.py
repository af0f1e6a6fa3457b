"""/v1/chat/completions over a real HTTP server: messages, tools, reasoning, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.access.limits import tokens_of
from services.gateway.http.parsing.registry import TOOL_PARSERS, make_tool_parser
from shared.messages import (
    ChatMessage,
    ChatOptions,
    FinishReason,
    RequestHeader,
    TokenizeRequest,
    TokenLogprobs,
    ToolCall,
)
from shared.packing import unpack_tokens
from shared.requests.sampling import SamplingParams
from tests.unit.gateway.http.client import events, http, streaming
from tests.unit.gateway.http.conversation.test_call_notations import MEETING, MEETINGS, in_form
from tests.unit.gateway.troupe import LAST

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Now", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = ASK | {"tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CUT: dict[str, Any] = {"finish_reason": FinishReason.LENGTH}


async def test_what_the_tokenizer_is_asked() -> None:
    async with http(tool_call_parser="hermes") as h:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Tom"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]
        body = {"messages": messages, "tools": [WEATHER], "max_completion_tokens": 7, "max_tokens": 5}
        more = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
        asked = h.post("/v1/chat/completions", body | more)
        request = await h.troupe.request()
        assert request.chat is not None and request.chat_options is not None
        assert [(m.role, m.content, m.name) for m in request.chat] == [
            ("system", "Be brief.", ""), ("user", "a\nb", "Tom"), ("assistant", "", ""), ("tool", "sunny", ""),
        ]  # fmt: skip
        assert (request.chat[2].tool_calls[0].arguments, request.chat[2].reasoning) == ('{"city": "Rome"}', "hm")
        assert request.chat[3].tool_call_id == "c1"
        assert request.params.max_tokens == 7
        assert json.loads(request.chat_options.tools) == [WEATHER]
        assert json.loads(request.chat_options.template_args) == {"enable_thinking": False, "reasoning_effort": "low"}
        assert request.chat_options.add_generation_prompt and not request.chat_options.continue_final_message
        h.troupe.say(request, "fine", **LAST)
        message = (await asked).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "fine", "refusal": None}


async def test_the_last_message_can_be_gone_on_with() -> None:
    async with http() as h:
        asked = h.post("/v1/chat/completions", ASK | {"continue_final_message": True})
        request = await h.troupe.request()
        assert request.chat_options is not None
        assert (request.chat_options.add_generation_prompt, request.chat_options.continue_final_message) == (
            False,
            True,
        )
        h.troupe.say(request, "fine", **LAST)
        assert (await asked).status_code == 200


async def test_calls_and_reasoning_in_a_whole_answer() -> None:
    async with http(tool_call_parser="hermes", reasoning_parser="qwen3") as h:
        asked = h.post("/v1/chat/completions", TOOLS)
        request = await h.troupe.request()
        h.troupe.say(request, f"<think>\nhm\n</think>\n\nI look. {CALL}{CALL}", **LAST)
        (choice,) = (await asked).json()["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (
            "hm",
            "I look.",
            "tool_calls",
        )
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "weather", "arguments": '{"city": "Rome"}'}
        ] * 2
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert all(call["type"] == "function" for call in message["tool_calls"])


def added_up(chunks: list[Any]) -> dict[str, Any]:
    """The message that a client makes of a stream's deltas."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        found["content"] += delta.get("content", "")
        found["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            kept = found["tool_calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            kept["name"] += call["function"].get("name", "")
            kept["arguments"] += call["function"]["arguments"]
    return found


async def test_calls_and_reasoning_in_a_stream() -> None:
    async with http(tool_call_parser="hermes", reasoning_parser="qwen3") as h:
        asked = h.post("/v1/chat/completions", streaming(TOOLS))
        request = await h.troupe.request()
        text = f"<think>\nhm 北京\n</think>\n\nI look. {CALL}{CALL}"
        for place in range(0, len(text), 3):
            piece = text[place : place + 3]
            more = LAST if place + 3 >= len(text) else {}
            h.troupe.say(request, piece, at=(place // 3, place), token_ids=[place], **more)
        chunks = events((await asked).text)
        call = {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert added_up(chunks) == {
            "content": "I look.", "reasoning_content": "hm 北京", "tool_calls": {0: call, 1: call},
        }  # fmt: skip
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]


async def test_only_one_call_where_only_one_is_wanted() -> None:
    async with http(tool_call_parser="hermes") as h:
        for body in (TOOLS, streaming(TOOLS)):
            asked = h.post("/v1/chat/completions", body | {"parallel_tool_calls": False})
            h.troupe.say(await h.troupe.request(), f"{CALL}{CALL} and so on", **LAST)
            response = await asked
            if "stream" in body:
                calls = added_up(events(response.text))["tool_calls"]
            else:
                calls = response.json()["choices"][0]["message"]["tool_calls"]
            assert len(calls) == 1


NAMED = TOOLS | {"tool_choice": {"type": "function", "function": {"name": "weather"}}}


@pytest.mark.parametrize(
    ("parser", "more"),
    [
        ("", {}),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("qwen3", {"reasoning_effort": "none"}),
        ("deepseek_v3", {}),  # which thinks where it is asked to
    ],
)
async def test_a_named_tool_is_begun_for_a_model_that_does_not_think(parser: str, more: dict[str, Any]) -> None:
    async with http(tool_call_parser="hermes", reasoning_parser=parser) as h:
        asked = h.post("/v1/chat/completions", NAMED | more)
        request = await h.troupe.request()
        assert request.chat_options is not None
        assert request.chat_options.opening == '<tool_call>\n{"name": "weather", "arguments": '
        assert request.params.thinking is None
        h.troupe.say(request, '{"city": "Rome"}}\n</tool_call>', **LAST)
        (answer,) = (await asked).json()["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parser", TOOL_PARSERS)
async def test_a_named_tool_is_called_by_its_name_in_every_notation(parser: str, stream: bool) -> None:
    """Its name, and in some notations the beginning of its arguments, are part of the prompt."""
    function = {"name": "meet", "parameters": MEETING.parameters}
    tools = ASK | {"tools": [{"type": "function", "function": function}]}
    body = tools | {"tool_choice": {"type": "function", "function": {"name": "meet"}}, "stream": stream}
    made = make_tool_parser(parser, {})
    assert made is not None
    arguments = MEETINGS[1]
    async with http(tool_call_parser=parser) as h:
        asked = h.post("/v1/chat/completions", body)
        request = await h.troupe.request()
        assert request.chat_options is not None
        if not (begun := request.chat_options.opening):
            pytest.skip("calls are not begun for the model in this notation")
        assert "meet" in begun
        text = in_form(made.form, arguments) + made.form.after + made.form.end
        h.troupe.say(request, "", token_ids=[1])
        h.troupe.say(request, text[:5], at=(1, 0), token_ids=[2])
        h.troupe.say(request, text[5:], at=(2, 5), token_ids=[3], **LAST)
        response = await asked
        assert response.status_code == 200, response.text
        if stream:
            calls = list(added_up(events(response.text))["tool_calls"].items())
            assert [place for place, _ in calls] == [0]
            found = calls[0][1]
        else:
            (call,) = response.json()["choices"][0]["message"]["tool_calls"]
            found = call["function"]
        assert found["name"] == "meet" and json.loads(found["arguments"]) == arguments


@pytest.mark.parametrize("choice", [NAMED["tool_choice"], "required"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_demanded_call_comes_behind_what_the_model_thinks(choice: Any, stream: bool) -> None:
    async with http(tool_call_parser="hermes", reasoning_parser="qwen3") as h:
        asked = h.post("/v1/chat/completions", TOOLS | {"tool_choice": choice, "stream": stream})
        request = await h.troupe.request()
        thinking, grammar = request.params.thinking, request.params.grammar
        assert request.chat_options is not None and not request.chat_options.opening
        assert thinking is not None and thinking.num_tokens == (1 << 31) - 1
        assert grammar is not None
        h.troupe.say(request, f"<think>\nhm\n</think>\n\n{CALL}", **LAST)
        response = await asked
        if stream:
            told = added_up(events(response.text))
            assert told["reasoning_content"] == "hm" and len(told["tool_calls"]) == 1 and not told["content"]
        else:
            message = response.json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("hm", None)
            assert message["tool_calls"][0]["function"]["name"] == "weather"


async def test_a_budget_holds_before_a_demanded_call_too() -> None:
    async with http(tool_call_parser="hermes", reasoning_parser="qwen3") as h:
        asked = h.post("/v1/chat/completions", NAMED | {"thinking_token_budget": 7})
        request = await h.troupe.request()
        assert request.params.thinking is not None and request.params.thinking.num_tokens == 7
        h.troupe.say(request, "<think>and so", **CUT)
        (answer,) = (await asked).json()["choices"]
        assert (answer["finish_reason"], answer["message"]["reasoning_content"]) == ("length", "and so")
        assert not answer["message"].get("tool_calls")


async def test_a_demanded_call_that_is_cut_before_its_name_is_no_content() -> None:
    async with http(tool_call_parser="hermes", reasoning_parser="qwen3") as h:
        asked = h.post("/v1/chat/completions", NAMED)
        h.troupe.say(await h.troupe.request(), '<think>hm</think>\n\n<tool_call>\n{"na', **CUT)
        (answer,) = (await asked).json()["choices"]
        assert (answer["message"]["reasoning_content"], answer["message"]["content"]) == ("hm", "")
        assert not answer["message"].get("tool_calls")


async def test_tools_that_are_not_to_be_called_are_not_shown() -> None:
    async with http() as h:
        asked = h.post("/v1/chat/completions", TOOLS | {"tool_choice": "none"})
        request = await h.troupe.request()
        assert request.chat_options is not None and not request.chat_options.tools
        h.troupe.say(request, CALL, **LAST)
        assert (await asked).json()["choices"][0]["message"]["content"] == CALL


async def test_a_format_of_special_tokens_keeps_them() -> None:
    async with http(tool_call_parser="mistral") as h:
        asked = h.post("/v1/chat/completions", TOOLS)
        request = await h.troupe.request()
        assert not request.params.skip_special_tokens
        h.troupe.say(request, '[TOOL_CALLS][{"name": "weather", "arguments": {}}]', **LAST)
        assert (await asked).json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_several_answers_are_read_each_by_itself() -> None:
    async with http(reasoning_parser="deepseek_r1") as h:
        asked = h.post("/v1/chat/completions", ASK | {"n": 2, "temperature": 1})
        request = await h.troupe.request()
        h.troupe.say(request, "hm</think>", index=0)
        h.troupe.say(request, "and so on", index=1, **CUT)
        h.troupe.say(request, "Yes", at=(1, 10), index=0, **LAST)
        first, second = (await asked).json()["choices"]
        assert (first["message"]["reasoning_content"], first["message"]["content"]) == ("hm", "Yes")
        assert (second["message"]["reasoning_content"], second["message"]["content"]) == ("and so on", "")
        assert (first["finish_reason"], second["finish_reason"]) == ("stop", "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_every_token(stream: bool) -> None:
    async with http() as h:
        asked = h.post("/v1/chat/completions", ASK | {"logprobs": True, "top_logprobs": 1, "stream": stream})
        request = await h.troupe.request()
        entry = TokenLogprobs([7, 8], [-1.5, -0.5], 2)
        h.troupe.say(request, "t7 t8", token_ids=[7, 8], logprobs=[entry, entry], **LAST)
        await h.answer_pieces()
        response = await asked
        choices = [c["choices"][0] for c in (events(response.text) if stream else [response.json()])]
        found = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        assert [one["token"] for one in found] == ["t7", "t8"]
        assert found[0] == {
            "token": "t7", "logprob": -1.5, "bytes": [116, 55],
            "top_logprobs": [{"token": "t8", "logprob": -0.5, "bytes": [116, 56]}],
        }  # fmt: skip


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_s_first_event_has_the_prompt_s_log_probabilities(n: int) -> None:
    async with http() as h:
        more = {"prompt_logprobs": 1, "n": n, "temperature": 1}
        asked = h.post("/v1/chat/completions", streaming(ASK | more))
        await h.answer_encode([3, 4])
        request = await h.troupe.request()
        assert request.params.prompt_logprobs == 1
        h.troupe.say(request, "a b", prompt_logprobs=[None, TokenLogprobs([4, 8], [-1.5, -0.5], 2)])
        assert set(await h.answer_pieces()) == {4, 8}
        for index in range(n):
            h.troupe.say(request, " c", at=(2, 3) if index == 0 else (0, 0), index=index, **LAST)
        first, *others = events((await asked).text)
        assert first["choices"][0]["delta"]["role"] == "assistant"
        assert first["prompt_logprobs"] == [
            None,
            {"4": {"logprob": -1.5, "rank": 2, "decoded_token": "t4"},
             "8": {"logprob": -0.5, "rank": 1, "decoded_token": "t8"}},
        ]  # fmt: skip
        assert others and all("prompt_logprobs" not in chunk for chunk in others)


async def test_ids_of_a_chat_are_asked_for_first() -> None:
    async with http() as h:
        asked = h.post("/v1/chat/completions", ASK | {"return_token_ids": True})
        question = await h.answer_encode([4, 5, 6])
        assert question.chat is not None and question.chat[0].content == "Hi"
        request = await h.troupe.request()
        assert unpack_tokens(request.token_ids or b"") == [4, 5, 6]
        assert request.params.max_tokens == 512 - 3, "a chat may use the rest of the context"
        h.troupe.say(request, "a b", **LAST)
        answer = (await asked).json()
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([4, 5, 6], [0, 1])


def test_what_stands_beside_the_messages_counts_for_the_limits() -> None:
    header, params = RequestHeader("r", "memory://g"), SamplingParams(max_tokens=1)
    plain = TokenizeRequest(header, params, chat=[ChatMessage("user", "Hi")])
    calling = [ChatMessage("assistant", "", tool_calls=[ToolCall("c", "f", "x" * 4000)])]
    with_tools = TokenizeRequest(header, params, chat=plain.chat, chat_options=ChatOptions(tools="x" * 4000))
    with_calls = TokenizeRequest(header, params, chat=[*(plain.chat or []), *calling])
    for request in (with_tools, with_calls):
        assert tokens_of(request, 4096, 1) - tokens_of(plain, 4096, 1) == 1000
