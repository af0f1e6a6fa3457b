"""Every field that clients send is known: it has its effect, is documented to have none, or is refused by name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import structlog

from services.gateway.http.chat.objects import ChatBody
from services.gateway.http.completions.endpoint import CompletionBody
from services.gateway.http.embeddings import EmbeddingBody
from services.gateway.http.messages.objects import MessagesBody, MessagesPrompt
from services.gateway.http.requests.fields import WithoutEffect, refused_fields
from services.gateway.http.responses.objects import ResponsesBody
from services.gateway.http.tokens import DetokenizeBody, TokenizeBody
from shared.messages import TokenLogprobs
from shared.packing import unpack_tokens
from tests.unit.gateway.http.client import Http, events, http, streaming
from tests.unit.gateway.troupe import LAST

DOCS = Path(__file__).resolve().parents[5] / "docs"
ASK: dict[str, Any] = {"prompt": "Once"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
ENDPOINTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, ASK),
    "/v1/chat/completions": (ChatBody, CHAT),
    "/v1/responses": (ResponsesBody, {"input": "Hi"}),
    "/v1/embeddings": (EmbeddingBody, {"input": "Hi"}),
    "/v1/messages": (MessagesBody, SAY),
    "/v1/messages/count_tokens": (MessagesPrompt, SAY),
}
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}  # not sent as fields
VLLM = {  # its extra sampling and other parameters, of which completions and chats have most
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "bad_words",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "prompt_logprobs",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "allowed_token_ids", "add_special_tokens",
    "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
    "guided_decoding_backend", "guided_whitespace_pattern", "structured_outputs", "priority", "request_id",
    "logits_processors", "return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params",
    "vllm_xargs", "best_of", "echo",
}  # fmt: skip
VLLM_CHAT = {
    "add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs",
    "mm_processor_kwargs", "include_reasoning", "parallel_tool_calls",
}  # fmt: skip


def names(body: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(body)}


def test_every_parameter_of_the_official_client_is_a_field() -> None:
    import openai  # a second: not for every worker of pytest

    client = openai.OpenAI(api_key="none")
    methods: dict[str, Any] = {
        "/v1/completions": client.completions.create,
        "/v1/chat/completions": client.chat.completions.create,
        "/v1/responses": client.responses.create,
        "/v1/embeddings": client.embeddings.create,
    }
    client.close()
    for path, method in methods.items():
        asked = set(inspect.signature(method).parameters) - OF_THE_CLIENT
        assert len(asked) > 4 and not asked - names(ENDPOINTS[path][0]), path


def test_every_parameter_of_anthropic_s_client_is_a_field() -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(api_key="none")
    for path, method in {
        "/v1/messages": client.messages.create,
        "/v1/messages/count_tokens": client.messages.count_tokens,
    }.items():
        asked = set(inspect.signature(method).parameters) - OF_THE_CLIENT
        assert len(asked) > 4 and not asked - names(ENDPOINTS[path][0]), path
    client.close()


def test_every_extra_parameter_of_vllm_is_a_field() -> None:
    assert not VLLM - names(CompletionBody)
    assert not (VLLM | VLLM_CHAT) - names(ChatBody)


def test_every_field_is_documented() -> None:
    text = "".join((DOCS / name).read_text() for name in ("reference/http.md", "http.md"))
    bodies: list[type[msgspec.Struct]] = [*(body for body, _ in ENDPOINTS.values()), TokenizeBody, DetokenizeBody]
    fields = {name for body in bodies for name in names(body)}
    assert len(fields) > 90
    assert not sorted(name for name in fields if f"`{name}`" not in text)


def refused(path: str) -> list[str]:
    return list(refused_fields(ENDPOINTS[path][0]))


def values(path: str, field: str) -> list[Any]:
    """Some of which the body's type will take."""
    kinds = (True, 7, "x", ["x"], {"x": "y"})
    body, ask = ENDPOINTS[path]
    found = []
    for value in kinds:
        try:
            msgspec.json.decode(json.dumps(ask | {field: value}), type=body)
            found.append(value)
        except msgspec.ValidationError:
            pass
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_what_cannot_be_done_is_refused_by_name(path: str) -> None:
    async with http() as h:
        assert len(refused(path)) > 6
        for field in refused(path):
            tried = values(path, field)
            assert tried, field
            for value in tried:
                status, error = await h.refusal(path, ENDPOINTS[path][1] | {field: value})
                assert (status, error["param"]) == (400, field), (field, value)
            nothing = msgspec.json.decode(json.dumps(ENDPOINTS[path][1] | {field: None}), type=ENDPOINTS[path][0])
            assert getattr(nothing, field) is None


WITHOUT_EFFECT: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s",
    "prompt_cache_key": "k",
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_what_has_no_effect_is_taken_in_silence(path: str) -> None:
    assert set(WITHOUT_EFFECT) == names(WithoutEffect)
    more: dict[str, Any] = {"verbosity": "low"} if path == "/v1/chat/completions" else {}
    async with http() as h:
        with structlog.testing.capture_logs() as lines:
            asked = h.post(path, ENDPOINTS[path][1] | WITHOUT_EFFECT | more)
            request = await h.troupe.request()
            h.troupe.say(request, "Yes", **LAST)
            assert (await asked).status_code == 200
        assert not [line for line in lines if line["event"] == "unknown_field_ignored"]
        plain = h.post(path, ENDPOINTS[path][1])
        same = await h.troupe.request()
        assert (request.params.temperature, request.text, request.chat) == (
            same.params.temperature, same.text, same.chat,
        )  # fmt: skip
        h.troupe.say(same, "Yes", **LAST)
        assert (await plain).status_code == 200


async def test_what_nobody_knows_is_named_in_the_log_and_ignored() -> None:
    async with http() as h:
        with structlog.testing.capture_logs() as lines:
            asked = h.post("/v1/completions", ASK | {"of_next_year": 1})
            h.troupe.say(await h.troupe.request(), "Yes", **LAST)
            assert (await asked).status_code == 200
        assert [line["field"] for line in lines if line["event"] == "unknown_field_ignored"] == ["of_next_year"]


async def test_a_chat_s_fields_reach_the_troupe() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": 0.2,
        "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True, "seed": 5, "n": 2, "bad_words": ["cat"],
        "include_stop_str_in_output": True, "skip_special_tokens": False, "allowed_token_ids": [1, 2],
        "stop_token_ids": [4], "speculate": False,
    }  # fmt: skip
    more = {"stop": "x", "logit_bias": {"3": 2}, "priority": 3, "request_id": "mine", "top_logprobs": 4}
    async with http() as h:
        asked = h.post("/v1/chat/completions", CHAT | given | more | {"logprobs": True, "max_tokens": 9, "best_of": 2})
        request = await h.troupe.request()
        for name, value in given.items():
            assert getattr(request.params, name) == value, name
        assert (request.params.stop, request.params.logit_bias, request.params.logprobs) == (["x"], {3: 2.0}, 4)
        assert (request.params.max_tokens, request.header.label, request.header.priority) == (9, "mine", 3)
        for index in range(2):
            h.troupe.say(request, "Yes", index=index, logprobs=[TokenLogprobs([0], [-0.5], 1)], **LAST)
        await h.answer_pieces()
        assert (await asked).status_code == 200


async def test_a_response_s_fields_reach_the_troupe() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5}
    async with http() as h:
        body = {"input": "Hi", "max_output_tokens": 9, "priority": 3, "request_id": "mine", "metadata": {"a": "b"}}
        asked = h.post("/v1/responses", body | given | {"stream_options": {"include_obfuscation": False}})
        request = await h.troupe.request()
        for name, value in given.items():
            assert getattr(request.params, name) == value, name
        assert (request.params.max_tokens, request.header.label, request.header.priority) == (9, "mine", 3)
        h.troupe.say(request, "Yes", **LAST)
        answer = (await asked).json()
        assert (answer["metadata"], answer["store"], answer["max_output_tokens"]) == ({"a": "b"}, False, 9)


@pytest.mark.parametrize(("limit", "kept"), [(2, [4, 5]), (9, [3, 4, 5]), (-1, [3, 4, 5])])
async def test_the_end_of_a_prompt_is_kept_where_it_is_to_be_cut(limit: int, kept: list[int]) -> None:
    async with http() as h:
        for path, ask in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
            asked = h.post(path, ask | {"truncate_prompt_tokens": limit})
            await h.answer_encode([3, 4, 5])
            request = await h.troupe.request()
            assert unpack_tokens(request.token_ids or b"") == kept
            h.troupe.say(request, "Yes", **LAST)
            assert (await asked).status_code == 200
        asked = h.post("/v1/completions", {"prompt": [3, 4, 5], "truncate_prompt_tokens": limit})
        request = await h.troupe.request()
        assert unpack_tokens(request.token_ids or b"") == kept
        h.troupe.say(request, "Yes", **LAST)
        assert (await asked).status_code == 200


async def test_a_prompt_that_is_too_long_is_cut_to_what_fits() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", {"prompt": list(range(600)), "truncate_prompt_tokens": -1})
        request = await h.troupe.request()
        assert unpack_tokens(request.token_ids or b"") == list(range(100, 600))
        h.troupe.say(request, "Yes", **LAST)
        assert (await asked).status_code == 200
        for limit in (0, -2):
            status, error = await h.refusal("/v1/completions", {"prompt": [1], "truncate_prompt_tokens": limit})
            assert (status, error["param"]) == (400, "truncate_prompt_tokens")


async def test_an_echo_shows_what_is_left_of_a_prompt() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", {"prompt": "Once upon", "truncate_prompt_tokens": 1, "echo": True})
        await h.answer_encode([3, 4])
        question = await h.answer_decode(" upon")
        assert unpack_tokens(question.token_ids) == [4]
        h.troupe.say(await h.troupe.request(), " a", **LAST)
        assert (await asked).json()["choices"][0]["text"] == " upon a"


@pytest.mark.parametrize(("role", "more", "shown"), [
    ("assistant", {"continue_final_message": True}, "Once"),
    ("assistant", {}, "Once"),
    ("user", {}, ""),
])  # fmt: skip
async def test_a_chat_can_show_the_message_that_it_goes_on_with(role: str, more: dict[str, Any], shown: str) -> None:
    async with http() as h:
        body = {"messages": [{"role": role, "content": "Once"}], "n": 2, "temperature": 1}
        for echo in (True, False):
            for asked in (body, streaming(body)):
                answer = h.post("/v1/chat/completions", asked | more | {"echo": echo})
                request = await h.troupe.request()
                for index in range(2):
                    h.troupe.say(request, " upon", index=index, **LAST)
                told = contents(await answer)
                assert told == [f"{shown if echo else ''} upon"] * 2


def contents(response: httpx2.Response) -> list[str]:
    """What each of the two choices says."""
    if "event-stream" not in response.headers["content-type"]:
        return [choice["message"]["content"] for choice in response.json()["choices"]]
    choices = [choice for chunk in events(response.text) for choice in chunk["choices"]]
    return ["".join(one["delta"].get("content", "") for one in choices if one["index"] == index) for index in range(2)]


async def test_what_a_model_thinks_is_left_out_where_nobody_wants_it() -> None:
    async with http(reasoning_parser="qwen3") as h:
        for wanted in (True, False, None):
            for body in (CHAT, streaming(CHAT)):
                told = await reasoning(h, body | {"include_reasoning": wanted})
                assert told == ("" if wanted is False else "hm", "Yes")


async def reasoning(h: Http, body: dict[str, Any]) -> tuple[str, str]:
    """Thought and answer as they are told."""
    asked = h.post("/v1/chat/completions", body)
    h.troupe.say(await h.troupe.request(), "<think>hm</think>Yes", **LAST)
    response = await asked
    if "stream" not in body:
        parts = [response.json()["choices"][0]["message"]]
    else:
        parts = [chunk["choices"][0]["delta"] for chunk in events(response.text)]
    return tuple("".join(part.get(name) or "" for part in parts) for name in ("reasoning_content", "content"))  # type: ignore[return-value]


@pytest.mark.parametrize(("more", "param"), [
    ({"best_of": 3}, "best_of"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"add_special_tokens": True}, "add_special_tokens"),
])  # fmt: skip
async def test_what_only_completions_have_is_refused_in_chats(more: dict[str, Any], param: str) -> None:
    async with http() as h:
        status, error = await h.refusal("/v1/chat/completions", CHAT | more)
        assert (status, error["param"]) == (400, param)
