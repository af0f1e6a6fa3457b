"""What goes wrong is a status that names the field; nothing that a client sends ends more than its request."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from services.gateway.bus.refusals import unavailable
from services.gateway.http.connection.protocol import MAX_HEADER_BYTES
from services.gateway.http.errors.failures import STATUS
from shared.errors import RejectCode
from shared.messages import RequestRejected, TokenLogprobs
from tests.unit.gateway.http.client import JSON, Http, events, http, streaming
from tests.unit.gateway.troupe import LAST, until

ASK: dict[str, Any] = {"prompt": "Once", "max_tokens": 4}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
FUNCTION = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
USE = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
SCHEMA = {"type": "json_schema", "schema": {}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
CALL = {"type": "function", "function": {"name": "f", "parameters": {}}}

BAD: list[tuple[str, Any, int, str | None]] = [
    ("/v1/completions", b"not JSON", 400, None),
    ("/v1/completions", b"[]", 400, None),
    ("/v1/completions", b"\xff\xfe", 400, None),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 400, None),
    ("/v1/completions", b'{"prompt": "a", "guided_json": ' + DEEP + b"}", 400, None),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", ASK | {"prompt": []}, 400, "prompt"),
    ("/v1/completions", ASK | {"prompt": ["a", 5]}, 400, "prompt"),
    ("/v1/completions", ASK | {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", ASK | {"prompt": [2**40]}, 400, "prompt"),
    ("/v1/completions", ASK | {"prompt": [[2**31]]}, 400, "prompt[0][0]"),
    ("/v1/completions", ASK | {"prompt": ["a"] * 257}, 400, "prompt"),
    ("/v1/completions", ASK | {"prompt": [5] * 501}, 400, "prompt"),
    ("/v1/completions", ASK | {"temperature": "hot"}, 400, "temperature"),
    ("/v1/completions", ASK | {"max_tokens": 2**70}, 400, "max_tokens"),
    ("/v1/completions", ASK | {"seed": 2**63}, 400, "seed"),
    ("/v1/completions", ASK | {"n": 10**9}, 400, "n"),
    ("/v1/completions", ASK | {"best_of": 10**9}, 400, "best_of"),
    ("/v1/completions", ASK | {"n": 3, "best_of": 2}, 400, "best_of"),
    ("/v1/completions", ASK | {"best_of": 2, "stream": True}, 400, "best_of"),
    ("/v1/completions", ASK | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/completions", ASK | {"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("/v1/completions", ASK | {"logit_bias": {"99999999999999999999": 1}}, 400, "logit_bias"),
    ("/v1/completions", ASK | {"suffix": "end"}, 400, "suffix"),
    ("/v1/completions", ASK | {"response_format": FORMAT, "guided_regex": "a"}, 400, "response_format"),
    ("/v1/completions", ASK | {"response_format": {"type": "xml"}}, 400, "response_format"),
    ("/v1/completions", ASK | {"response_format": {"type": "json_schema"}}, 400, "response_format"),
    ("/v1/completions", ASK | {"guided_regex": 5}, 400, "guided_regex"),
    ("/v1/completions", ASK | {"guided_choice": "yes"}, 400, "guided_choice"),
    ("/v1/completions", ASK | {"guided_json": [1]}, 400, "guided_json"),
    ("/v1/completions", ASK | {"structured_outputs": {"regex": "a", "json": {}}}, 400, "structured_outputs"),
    ("/v1/completions", ASK | {"structured_outputs": {"structural_tag": {}}}, 400, "structured_outputs"),
    ("/v1/completions", ASK | {"structured_outputs": "json"}, 400, "structured_outputs"),
    ("/v1/completions", ASK | {"use_beam_search": True, "stream": True}, 400, "stream"),
    ("/v1/completions", ASK | {"use_beam_search": True, "early_stopping": "soon"}, 400, "early_stopping"),
    ("/v1/completions", ASK | {"beam_width": 4}, 400, "beam_width"),
    ("/v1/completions", ASK | {"length_penalty": 1.5}, 400, "length_penalty"),
    ("/v1/chat/completions", CHAT | {"use_beam_search": True, "stream": True}, 400, "stream"),
    ("/v1/embeddings", {}, 400, "input"),
    ("/v1/embeddings", {"input": []}, 400, "input"),
    ("/v1/embeddings", {"input": ["a", [1]]}, 400, "input"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "input"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "endianness": "big"}, 400, "endianness"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64", "embed_dtype": "int8"}, 400, "embed_dtype"),
    ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, 400, "use_activation"),
    ("/v1/embeddings", {"input": "a", "messages": []}, 400, "input"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 2, "truncation_side": "up"}, 400, "truncation_side"),
    ("/v1/completions", {"prompt": "a", "logprob_token_ids": [1]}, 400, "logprob_token_ids"),
    ("/v1/chat/completions", CHAT | {"thinking_token_budget": 5}, 400, "thinking_token_budget"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2.5}, 400, "max_tokens"),
    ("/v1/embeddings", {"input": "a", "pooling": "max"}, 400, "pooling"),
    ("/v1/embeddings", {"input": "a", "model": "gpt-7"}, 404, "model"),
    ("/v1/completions", ASK | {"cache_salt": ""}, 400, "cache_salt"),
    ("/v1/completions", ASK | {"prompt_cache_retention": "1y"}, 400, "prompt_cache_retention"),
    ("/v1/completions", ASK | {"prompt_cache_options": {"ttl": "2d"}}, 400, "prompt_cache_options.ttl"),
    ("/v1/completions", ASK | {"request_id": "x" * 257}, 400, "request_id"),
    ("/v1/completions", ASK | {"model": "gpt-7"}, 404, "model"),
    ("/v1/chat/completions", {}, 400, "messages"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     "messages[0].content[0]"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs"),
    ("/v1/chat/completions", CHAT | {"chat_template": "{{ x }}"}, 400, "chat_template"),
    ("/v1/chat/completions", CHAT | {"functions": [{"name": "f"}]}, 400, "functions"),
    ("/v1/chat/completions", CHAT | {"modalities": ["audio"]}, 400, "modalities"),
    ("/v1/chat/completions", CHAT | {"tools": [CALL]}, 400, "tools"),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "web_search"}]}, 400, "tools[0].function"),
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", CHAT | {"tool_choice": "sometimes"}, 400, "tool_choice"),
    ("/v1/chat/completions", CHAT | {"tool_choice": {"type": "function", "function": {"name": "g"}}}, 400,
     "tool_choice"),
    ("/v1/chat/completions", CHAT | {"n": 65}, 400, "n"),
    ("/v1/responses", {}, 400, "input"),
    ("/v1/responses", {"input": "x", "tools": [CALL]}, 400, "tools[0].name"),
    ("/v1/responses", {"input": "x", "tools": [FUNCTION]}, 400, "tools"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "custom", "name": "f"}]}, 400, "tools[0].type"),
    ("/v1/responses", {"input": "x", "tools": [FUNCTION | {"defer_loading": True}]}, 400, "tools[0].defer_loading"),
    ("/v1/responses", {"input": "x", "tools": [FUNCTION | {"async": True}]}, 400, "tools[0].async"),
    ("/v1/responses", {"input": "x", "tools": [FUNCTION | {"allowed_callers": ["program"]}]}, 400,
     "tools[0].allowed_callers"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, 400,
     "tools[0].tools[0].type"),
    ("/v1/responses", {"input": "x", "tools": [FUNCTION] * 300}, 400, "tools"),
    ("/v1/responses", {"input": "x", "tool_choice": {"type": "file_search"}}, 400, "tool_choice"),
    ("/v1/responses", {"input": "x", "tool_choice": {"type": "function"}}, 400, "tool_choice.name"),
    ("/v1/responses", {"input": "x", "tool_choice": {"type": "function", "name": "g"}}, 400, "tool_choice"),
    ("/v1/responses", {"input": "x", "tool_choice": ALLOWED}, 400, "tool_choice"),
    ("/v1/responses", {"input": "x", "tool_choice": 5}, 400, "tool_choice"),
    ("/v1/responses", {"input": "x", "include": ["file_search_call.results"]}, 400, "include"),
    ("/v1/responses", {"input": []}, 400, "input"),
    ("/v1/responses", {"input": [{"content": "x"}]}, 400, "input[0].role"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0]"),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c"}]}, 400, "input[0].name"),
    ("/v1/responses", {"input": [{"type": "function_call", "name": "f"}]}, 400, "input[0].call_id"),
    ("/v1/responses", {"input": [{"type": "reasoning", "encrypted_content": "gAAA!"}]}, 400,
     "input[0].encrypted_content"),
    ("/v1/responses", {"input": [{"type": "reasoning", "content": [{"type": "summary_text"}]}]}, 400,
     "input[0].content[0]"),
    ("/v1/responses", {"input": [OUTPUT]}, 400, "input[0].output[0]"),
    ("/v1/messages", {}, 400, "messages"),
    ("/v1/messages", SAY | {"max_tokens": None}, 400, "max_tokens"),
    ("/v1/messages", SAY | {"messages": []}, 400, "messages"),
    ("/v1/messages", SAY | {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
    ("/v1/messages", SAY | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
     "messages[0].content[0]"),
    ("/v1/messages", SAY | {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400,
     "messages[0].content[0].text"),
    ("/v1/messages", SAY | {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, 400,
     "messages[0].content[0]"),
    ("/v1/messages", SAY | {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, 400,
     "messages[0].content[0].name"),
    ("/v1/messages", SAY | {"messages": [{"role": "assistant", "content": [USE]}]}, 400, "messages"),
    ("/v1/messages", SAY | {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, 400,
     "messages[0].content[0]"),
    ("/v1/messages", SAY | {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400,
     "messages[0].content[0].tool_use_id"),
    ("/v1/messages", SAY | {"system": [{"type": "image"}]}, 400, "system[0]"),
    ("/v1/messages", SAY | {"tools": [{"name": "f", "input_schema": {}}]}, 400, "tools"),
    ("/v1/messages", SAY | {"tools": [{"name": "f"}]}, 400, "tools[0].input_schema"),
    ("/v1/messages", SAY | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "tools[0].type"),
    ("/v1/messages", SAY | {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, 400,
     "tools[0].defer_loading"),
    ("/v1/messages", SAY | {"tool_choice": {"type": "some"}}, 400, "tool_choice.type"),
    ("/v1/messages", SAY | {"tool_choice": {"type": "tool"}}, 400, "tool_choice.name"),
    ("/v1/messages", SAY | {"tool_choice": {"type": "any"}}, 400, "tool_choice"),
    ("/v1/messages", SAY | {"thinking": {"type": "between_tools"}}, 400, "thinking.type"),
    ("/v1/messages", SAY | {"thinking": {"type": "adaptive", "display": "none"}}, 400, "thinking.display"),
    ("/v1/messages", SAY | {"output_config": {"format": {"type": "xml"}}}, 400, "output_config.format"),
    ("/v1/messages", SAY | {"output_config": {"task_budget": {}}}, 400, "output_config.task_budget"),
    ("/v1/messages", SAY | {"output_config": {"format": SCHEMA}, "output_format": SCHEMA}, 400, "output_format"),
    ("/v1/messages", SAY | {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, 400,
     "context_management"),
    ("/v1/messages", SAY | {"speed": "fast"}, 400, "speed"),
    ("/v1/messages", SAY | {"model": "claude-7"}, 404, "model"),
    ("/v1/messages/count_tokens", {}, 400, "messages"),
    ("/v1/messages/count_tokens", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
    ("/v1/responses", {"input": "x", "tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/responses", {"input": "x", "truncation": "auto"}, 400, "truncation"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ("/v1/responses", {"input": [{"type": "function_call_output"}]}, 400, "input[0].call_id"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": []}, 400, "messages"),
    ("/detokenize", {"tokens": [-5]}, 400, "tokens[0]"),
    ("/v1/nothing", {}, 404, None),
]  # fmt: skip


async def test_bad_input_is_refused_by_field_and_harms_nobody() -> None:
    async with http() as h:
        healthy = h.post("/v1/completions", ASK)
        request = await h.troupe.request()
        for path, body, status, param in BAD:
            found, error = await h.refusal(path, body)
            assert (found, error["param"]) == (status, param), (path, body if len(body) < 500 else "...", error)
            is_theirs = path.startswith("/v1/messages") and status == 404  # Anthropic's clients know it by its type
            assert error["message"] and error["type"] == ("not_found_error" if is_theirs else "invalid_request_error")
        h.troupe.say(request, "fine", **LAST)
        assert (await healthy).json()["choices"][0]["text"] == "fine"
        assert not len(h.troupe.gateway.generation.journal)


@pytest.mark.parametrize("code", list(RejectCode))
@pytest.mark.parametrize("body", [ASK, streaming(ASK)], ids=["whole", "streaming"])
async def test_each_refusal_is_a_status_with_the_field_and_when_to_come_back(code: RejectCode, body: Any) -> None:
    async with http() as h:
        asked = h.post("/v1/completions", body)
        request = await h.troupe.request()
        stream = h.troupe.gateway.generation.journal.get(request.header.request_id)
        assert stream is not None
        if code is RejectCode.UNAVAILABLE:
            stream.fail(unavailable("gone"))
        else:
            h.troupe.tell(RequestRejected(request.header.request_id, code, "must be at most 64, got 65", "n", 1250))
        response = await asked
        assert response.status_code == STATUS[code]
        if code is not RejectCode.UNAVAILABLE:
            assert response.json()["error"]["param"] == "n"
            assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("2", "1250")


async def test_a_failure_in_the_middle_of_a_stream_is_its_last_event() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", streaming(ASK))
        request = await h.troupe.request()
        h.troupe.say(request, "some")
        await h.troupe.sent(request)
        assert h.troupe.gateway.generation.abort(request_id=request.header.request_id) == 1
        response = await asked
        first, last = events(response.text)
        assert first["choices"][0]["text"] == "some"
        assert last["error"]["code"] == "cancelled"


async def test_a_mistake_of_ours_costs_its_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    async with http() as h:
        asked = h.post("/v1/completions", ASK | {"logprobs": 0, "return_tokens_as_token_ids": True})
        one_for_two_tokens = [TokenLogprobs([5], [-0.5], 1)]
        h.troupe.say(await h.troupe.request(), "a b", logprobs=one_for_two_tokens, **LAST)
        response = await asked
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        assert "request_failed_unexpectedly" in capsys.readouterr().out
        healthy = h.post("/v1/completions", ASK)
        h.troupe.say(await h.troupe.request(), "fine", **LAST)
        assert (await healthy).status_code == 200


async def test_a_client_s_deadline() -> None:
    async with http() as h:
        status, error = await h.refusal("/v1/completions", ASK, **{"x-request-timeout": "0.1"})
        assert (status, error["type"]) == (504, "timeout_error")
        await until(lambda: not len(h.troupe.gateway.generation.journal))
        for bad in ("soon", "-1", "nan", "1e99"):
            status, error = await h.refusal("/v1/completions", ASK, **{"x-request-timeout": bad})
            assert (status, error["param"]) == (400, "x-request-timeout")


async def test_a_body_that_is_too_large_is_not_read() -> None:
    async with http(max_request_bytes=1000) as h:
        status, error = await h.refusal("/v1/completions", ASK | {"prompt": "x" * 2000})
        assert status == 413 and "max_request_bytes=1000" in error["message"]

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        response = await h.client.post("/v1/completions", content=pieces(), headers=JSON)
        assert response.status_code == 413


async def test_headers_without_end_are_not_gathered() -> None:
    async with http() as h:
        port = h.client.base_url.port

        def send() -> bytes:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nx-long: ")
                for _ in range(100):
                    try:
                        connection.sendall(b"x" * MAX_HEADER_BYTES)
                    except OSError:
                        return b"closed"
                return connection.recv(100)

        answer = await asyncio.to_thread(send)
        assert answer == b"closed" or answer.startswith(b"HTTP/1.1 400 ")
        assert (await h.client.get("/version")).status_code == 200


async def test_who_has_no_key_gets_nothing_but_health() -> None:
    async with http(api_keys="acme:correct-horse") as h:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/nothing"):
            for headers in ({}, {"authorization": "Bearer wrong-horse"}):
                response = await h.post(path, ASK, **headers)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["type"] == "authentication_error"
        for path in ("/metrics", "/v1/models"):
            assert (await h.client.get(path)).status_code == 401
        for path in ("/health", "/version", "/"):
            assert (await h.client.get(path)).status_code == 200
        asked = h.post("/v1/completions", ASK, authorization="Bearer correct-horse", **{"x-tenant": "other"})
        request = await h.troupe.request()
        assert request.header.tenant == "acme", "who asks is whose key it is"
        h.troupe.say(request, "fine", **LAST)
        assert (await asked).status_code == 200


async def test_limits_are_the_same_as_grpc_s() -> None:
    async with http(max_open_reqs=1) as h:
        first = h.post("/v1/completions", ASK)
        request = await h.troupe.request()
        response = await h.post("/v1/completions", ASK)
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        h.troupe.say(request, "fine", **LAST)
        assert (await first).status_code == 200


async def stop(h: Http) -> None:
    h.troupe.gateway.request_drain(0.001)


async def test_a_gateway_that_leaves_says_so() -> None:
    async with http(drain_timeout=3) as h:
        asked = h.post("/v1/completions", streaming(ASK))
        request = await h.troupe.request()
        h.troupe.say(request, "some")
        await h.troupe.sent(request)
        await stop(h)
        assert "error" in events((await asked).text)[-1]


@pytest.mark.parametrize("name", ["好" * 86, "a" * 256])  # 258 and 256 bytes, more than a file's name may have
async def test_a_model_whose_name_no_file_can_have_is_not_served(tmp_path: Path, name: str) -> None:
    async with http(lora_dir=str(tmp_path)) as h:
        status, error = await h.refusal("/v1/completions", {"model": name, "prompt": "Once"})
        assert (status, error["param"]) == (404, "model")
        assert (await h.client.get(f"/v1/models/{name}")).status_code == 404
