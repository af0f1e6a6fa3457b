"""What clients of vLLM and llama.cpp send and read beyond OpenAI's description: honoured, or refused by name."""

from __future__ import annotations

import base64
import json
import struct
from array import array
from typing import Any

import pytest
import torch

from services.gateway.http.answers.vectors import packed, shortened
from shared.errors import RequestError
from shared.messages import DescribeRequest, DescribeResult, FinishReason
from shared.packing import unpack_tokens
from shared.requests.grammar import GrammarKind
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.http.test_embeddings import tell
from tests.unit.gateway.troupe import LAST

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "edit", "parameters": {"properties": {"n": {"type": "string"}}}}}
CODER = "{{ messages }}<function=x><parameter=y><think>{% if add_generation_prompt %}</think>{% endif %}"


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


async def described(h: Http, template: str) -> None:
    _, question = await h.troupe.asked(DescribeRequest)
    config = json.dumps({"tokenizer_class": "X", "chat_template": template})
    h.troupe.tell(DescribeResult(question.request_id, config))


async def test_auto_takes_the_formats_of_the_checkpoint_s_template() -> None:
    async with http(tool_call_parser="auto", reasoning_parser="auto") as h:
        asked = h.post("/v1/chat/completions", CHAT | {"tools": [TOOL]})
        await described(h, CODER)
        request = await h.troupe.request()
        call = "<tool_call>\n<function=edit>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
        h.troupe.say(request, f"<think>hm</think>Yes.\n{call}", **LAST)
        message = (await asked).json()["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "hm" and message["content"] == "Yes."
        (found,) = message["tool_calls"]
        assert found["function"] == {"name": "edit", "arguments": '{"n": "5"}'}, "a string, as the schema says"
        again = h.post("/v1/chat/completions", CHAT)  # the tokenizer is asked once
        h.troupe.say(await h.troupe.request(), "fine", **LAST)
        assert (await again).json()["choices"][0]["message"]["content"] == "fine"


async def test_auto_without_a_known_format_refuses_tools() -> None:
    async with http(tool_call_parser="auto") as h:
        asked = h.post("/v1/chat/completions", CHAT | {"tools": [TOOL]})
        await described(h, "{{ messages }}")
        response = await asked
        assert response.status_code == 400 and response.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "edit"}}])
async def test_a_call_that_is_cut_at_its_first_token_is_no_call(choice: Any) -> None:
    async with http(tool_call_parser="hermes") as h:
        body = CHAT | {"tools": [TOOL], "tool_choice": choice, "max_tokens": 1}
        whole, streamed = h.post("/v1/chat/completions", body), h.post("/v1/chat/completions", body | {"stream": True})
        for _ in range(2):
            h.troupe.say(await h.troupe.request(), '{"', token_ids=[7], finish_reason=FinishReason.LENGTH)
        (answer,) = (await whole).json()["choices"]
        assert "tool_calls" not in answer["message"] and not answer["message"]["content"]
        assert answer["finish_reason"] == "length"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks((await streamed).text)]
        assert not any("tool_calls" in delta or delta.get("content") for delta in deltas)


async def test_whole_answers_have_vllm_s_keys_and_no_null_where_a_text_belongs() -> None:
    async with http() as h:
        chat, completion = h.post("/v1/chat/completions", CHAT), h.post("/v1/completions", {"prompt": "a"})
        for _ in range(2):
            h.troupe.say(await h.troupe.request(), "x", **LAST)
        said, text = (await chat).json(), (await completion).json()
        assert said["prompt_logprobs"] is None and said["prompt_token_ids"] is None
        assert text["choices"][0]["prompt_logprobs"] is None and text["choices"][0]["prompt_token_ids"] is None
        assert "system_fingerprint" not in said and "system_fingerprint" not in text


async def test_usage_in_every_event_needs_usage_and_counts_no_token_for_the_role() -> None:
    async with http() as h:
        for wanted in (False, True):
            options = {"include_usage": wanted, "continuous_usage_stats": True}
            asked = h.post("/v1/chat/completions", CHAT | {"stream": True, "stream_options": options})
            h.troupe.say(await h.troupe.request(), "x", token_ids=[1], **LAST)
            usages: list[Any] = [chunk.get("usage") for chunk in chunks((await asked).text)]
            if wanted:
                assert [usage["completion_tokens"] for usage in usages] == [0, 1, 1]
            else:
                assert not any(usages)


async def test_usage_ends_streams_where_the_server_says_so() -> None:
    async with http(enable_force_include_usage=True) as h:
        asked = h.post("/v1/completions", {"prompt": "a", "stream": True})
        h.troupe.say(await h.troupe.request(), "x", **LAST)
        last = chunks((await asked).text)[-1]
        assert last["choices"] == [] and last["usage"]["total_tokens"]


async def test_whole_numbers_may_have_a_point() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", b'{"prompt": [5.0, 6], "max_tokens": 2.0, "seed": 3.0, "temperature": 1}')
        request = await h.troupe.request()
        assert (request.params.max_tokens, request.params.seed) == (2, 3)
        assert unpack_tokens(request.token_ids or b"") == [5, 6]
        h.troupe.say(request, "x", **LAST)
        assert (await asked).status_code == 200


FORMATS = [
    ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, GrammarKind.JSON_SCHEMA),
    ({"json_schema": {"type": "object"}}, GrammarKind.JSON_SCHEMA),
    ({"grammar": 'root ::= "a"'}, GrammarKind.GRAMMAR),
]


@pytest.mark.parametrize(("fields", "kind"), FORMATS)
async def test_llama_cpp_s_formats_are_honoured(fields: dict[str, Any], kind: GrammarKind) -> None:
    async with http() as h:
        asked = h.post("/v1/chat/completions", CHAT | fields)
        request = await h.troupe.request()
        assert request.params.grammar is not None and request.params.grammar.kind is kind
        h.troupe.say(request, "{}", **LAST)
        await asked


async def test_a_prompt_is_cut_on_the_side_that_is_asked() -> None:
    async with http() as h:
        for side, kept in (("right", [1, 2]), ("left", [3, 4])):
            body = {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2, "truncation_side": side}
            asked = h.post("/v1/completions", body)
            request = await h.troupe.request()
            assert unpack_tokens(request.token_ids or b"") == kept
            h.troupe.say(request, "x", **LAST)
            await asked


async def test_all_keys_that_are_no_token_ids_are_named() -> None:
    async with http() as h:
        status, error = await h.refusal("/v1/completions", {"prompt": "a", "logit_bias": {"one": 1, "7": 1, "two": 1}})
        assert status == 400 and "'one', 'two'" in error["message"] and error["param"] == "logit_bias"


async def test_the_client_s_id_comes_back_beside_the_server_s() -> None:
    async with http() as h:
        for given in ({"x-request-id": "mine"}, {}):
            asked = h.post("/v1/completions", {"prompt": "a"}, **given)
            request = await h.troupe.request()
            h.troupe.say(request, "x", **LAST)
            headers = (await asked).headers
            assert headers["x-pageant-request-id"] == request.header.request_id
            assert headers["x-request-id"] == (given.get("x-request-id") or request.header.request_id)


async def test_a_model_has_all_its_names() -> None:
    async with http(served_model_name="big, small") as h:
        listed = (await h.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["big", "small"]
        asked = h.post("/v1/completions", {"prompt": "a", "model": "small"})
        h.troupe.say(await h.troupe.request(), "x", **LAST)
        assert (await asked).json()["model"] == "big"
        assert (await h.refusal("/v1/completions", {"prompt": "a", "model": "big, small"}))[0] == 404


async def test_load_and_the_tokenizer_s_configuration() -> None:
    async with http() as h:
        assert (await h.client.get("/load")).json() == {"server_load": 0}
        asked = h.post("/v1/completions", {"prompt": "a"})
        request = await h.troupe.request()
        assert (await h.client.get("/load")).json() == {"server_load": 1}
        h.troupe.say(request, "x", **LAST)
        await asked
        assert (await h.client.get("/ping")).status_code == 200


async def test_embeddings_of_a_chat_shortened_and_packed() -> None:
    async with http() as h:
        body = CHAT | {"dimensions": 2, "encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
        asked = h.post("/v1/embeddings", body)
        question = await h.answer_encode([4, 5])
        assert question.chat is not None and question.chat_options is not None
        assert not question.chat_options.add_generation_prompt
        request = await h.troupe.request()
        assert unpack_tokens(request.token_ids or b"") == [4, 5]
        tell(h.troupe, request, [0.6, 0.8, 5.0])
        answer = (await asked).json()
        vector = struct.unpack(">2e", base64.b64decode(answer["data"][0]["embedding"]))
        assert vector == pytest.approx((0.6, 0.8), abs=1e-3) and answer["id"].startswith("embd-")


@pytest.mark.parametrize(("dtype", "kind", "largest"), [
    ("fp8_e4m3", torch.float8_e4m3fn, 448.0), ("fp8_e5m2", torch.float8_e5m2, 57344.0),
])  # fmt: skip
def test_vectors_of_eight_bits_are_rounded_as_torch_does(dtype: str, kind: torch.dtype, largest: float) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()
    every = every[every.isfinite()].sort().values
    values = torch.cat([every, (every[1:] + every[:-1]) / 2, torch.randn(500), torch.tensor([1e-9, -1e-9])])
    assert packed(array("f", values.tolist()), dtype, None) == bytes(values.to(kind).view(torch.uint8).tolist())
    (code,) = packed(array("f", [1e6]), dtype, None)
    assert torch.tensor([code], dtype=torch.uint8).view(kind).item() == largest, "beyond the largest it is that"


@pytest.mark.parametrize("encoding", ["bytes", "bytes_only"])
async def test_vectors_may_be_the_body(encoding: str) -> None:
    async with http() as h:
        asked = h.post("/invocations", {"input": ["a", "b"], "encoding_format": encoding, "embed_dtype": "float16"})
        for request in [await h.troupe.request(), await h.troupe.request()]:
            tell(h.troupe, request, [0.5, 1.0] if request.text == "a" else [2.0, -1.0])
        response = await asked
        assert response.headers["content-type"] == "application/octet-stream"
        assert response.content == struct.pack("<4e", 0.5, 1.0, 2.0, -1.0)
        assert ("metadata" in response.headers) is (encoding == "bytes")
        if encoding == "bytes":
            described = json.loads(response.headers["metadata"])
            assert [(one["start"], one["end"], one["shape"]) for one in described["data"]] == [(0, 4, [2]), (4, 8, [2])]
            assert described["data"][0]["embed_dtype"] == "float16" and described["usage"]["prompt_tokens"]
        many = {"input": ["a"] * 257, "encoding_format": "bytes"}
        status, error = await h.refusal("/v1/embeddings", many)
        assert (status, error["param"]) == (400, "encoding_format")


def test_vectors_are_packed_as_asked() -> None:
    vector = array("f", [1.0, -2.5, 0.1])
    assert packed(vector, None, "little") == struct.pack("<3f", 1.0, -2.5, 0.1)
    halves = struct.unpack("<3H", packed(vector, "bfloat16", "little"))
    assert halves == (0x3F80, 0xC020, 0x3DCD), "rounded to the nearest"
    assert shortened(vector, 1, normalize=True).tolist() == [1.0]
    assert shortened(vector, 2, normalize=False).tolist() == [1.0, -2.5]
    with pytest.raises(RequestError, match="between 1 and 3"):
        shortened(vector, 4, normalize=True)
