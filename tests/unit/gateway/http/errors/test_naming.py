"""`param` of an error names what the client sent, whatever the troupe calls it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protos.pageant.v1 import inference_pb2
from services.gateway.http.chat.objects import ChatBody
from services.gateway.http.completions.endpoint import CompletionBody
from services.gateway.http.embeddings import EmbeddingBody
from services.gateway.http.errors.naming import HEADERS, sent_name
from services.gateway.http.responses.objects import ResponsesBody, turns_of
from services.gateway.http.tokens import DetokenizeBody, TokenizeBody
from shared.errors import CONTEXT_LENGTH_EXCEEDED, RejectCode
from shared.messages import EncodeRequest, RequestRejected
from shared.requests.sampling import SamplingParams
from tests.unit.gateway.http.client import Http, http, streaming
from tests.unit.gateway.troupe import failure, front

HI = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDING, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"
ASK: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "Once"},
    CHAT: {"messages": HI},
    RESPONSE: {"input": "Hi"},
    EMBEDDING: {"input": "Hi"},
    TOKENIZE: {"prompt": "Hi"},
    DETOKENIZE: {"tokens": [1]},
}
BODIES: dict[str, type[msgspec.Struct]] = {
    COMPLETION: CompletionBody, CHAT: ChatBody, RESPONSE: ResponsesBody, EMBEDDING: EmbeddingBody,
    TOKENIZE: TokenizeBody, DETOKENIZE: DetokenizeBody,
}  # fmt: skip
PROMPTS = {COMPLETION: "prompt", CHAT: "messages", RESPONSE: "input", EMBEDDING: "input", TOKENIZE: "prompt",
           DETOKENIZE: "tokens"}  # fmt: skip
BEAM = {"use_beam_search": True}
INTERNAL = {
    "bad_words_token_ids",
    "detokenize",
    "grammar",
    "beam",
    "thinking",
}  # refused under the name of what they came from

# The endpoint, what is sent beside the prompt, the troupe's field, and the client's.
RENAMED: list[tuple[str, dict[str, Any], str, str]] = [
    *((path, {}, "prompt", name) for path, name in PROMPTS.items()),
    *((path, {}, "token_ids", name) for path, name in PROMPTS.items()),
    (CHAT, {}, "chat", "messages"),
    (CHAT, {}, "chat.messages[1].role", "messages[1].role"),
    (RESPONSE, {}, "chat", "input"),
    (RESPONSE, {"input": HI}, "chat.messages[1].role", "input[1].role"),
    (RESPONSE, {"input": HI, "instructions": "x"}, "chat.messages[2].role", "input[1].role"),
    (RESPONSE, {"input": HI, "instructions": "x"}, "chat.messages[0].role", "instructions.role"),
    (TOKENIZE, {"prompt": None, "messages": HI}, "prompt", "messages"),
    (TOKENIZE, {"prompt": None, "messages": HI}, "chat", "messages"),
    (TOKENIZE, {"prompt": None, "messages": HI}, "chat.messages[0].role", "messages[0].role"),
    (COMPLETION, {"max_tokens": 5}, "max_tokens", "max_tokens"),
    (CHAT, {"max_tokens": 5}, "max_tokens", "max_tokens"),
    (CHAT, {"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", "max_completion_tokens"),
    (RESPONSE, {"max_output_tokens": 5}, "max_tokens", "max_output_tokens"),
    (COMPLETION, {"n": 3}, "n", "n"),
    (COMPLETION, {"n": 3, "best_of": 4}, "n", "best_of"),
    (COMPLETION, {"logprobs": 5}, "logprobs", "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 5}, "logprobs", "top_logprobs"),
    (CHAT, {"logprobs": True}, "logprobs", "logprobs"),
    (COMPLETION, {"logprobs": 5, "echo": True}, "prompt_logprobs", "logprobs"),
    (COMPLETION, {"prompt_logprobs": 5}, "prompt_logprobs", "prompt_logprobs"),
    (COMPLETION, BEAM | {"beam_width": 5}, "beam_width", "beam_width"),
    (COMPLETION, BEAM | {"best_of": 5}, "beam_width", "best_of"),
    (CHAT, BEAM | {"n": 5}, "beam_width", "n"),
    (CHAT, {"request_id": "x"}, "label", "request_id"),
    (CHAT, {}, "label", "x-request-id"),
    (EMBEDDING, {}, "label", "x-request-id"),
    (CHAT, {}, "idempotency_key", "idempotency-key"),
    (RESPONSE, {"reasoning": {"effort": "low"}}, "chat_template_kwargs", "reasoning"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "given", "field", "name"), RENAMED)
def test_each_field_of_the_troupe_has_the_client_s_name(
    path: str, given: dict[str, Any], field: str, name: str
) -> None:
    body = msgspec.convert(ASK[path] | given, BODIES[path])
    names = turns_of(body).names if isinstance(body, ResponsesBody) else None
    assert sent_name(body, field, names) == name


@pytest.mark.parametrize("path", [COMPLETION, CHAT, RESPONSE])
def test_every_sampling_parameter_that_can_be_refused_is_a_field_or_a_header(path: str) -> None:
    """A parameter that is added tomorrow must have a name that clients know."""
    body = msgspec.convert(ASK[path], BODIES[path])
    fields = {field.encode_name for field in msgspec.structs.fields(BODIES[path])}
    refused = {field.name for field in msgspec.structs.fields(SamplingParams)} - INTERNAL
    cannot_be_sent = {name for name in refused if sent_name(body, name) not in fields | set(HEADERS.values())}
    allowed = {COMPLETION: {"pooling"}, CHAT: {"pooling"}}.get(path)
    if allowed is not None:
        assert cannot_be_sent == allowed
    assert {"temperature", "top_p", "top_k", "seed", "max_tokens"} <= refused - cannot_be_sent
    for of_prompt in ("prompt", "token_ids", "label", "idempotency_key", "priority", "model"):
        assert sent_name(body, of_prompt) in fields | set(HEADERS.values())


@pytest.mark.parametrize("body", [ASK[CHAT], streaming(ASK[CHAT])], ids=["whole", "streaming"])
async def test_a_refusal_from_within_comes_out_in_the_client_s_words(body: dict[str, Any]) -> None:
    async with http() as h:
        error = await refused(
            h, CHAT, body | {"max_completion_tokens": 5}, "max_tokens must be at least 1", "max_tokens"
        )
        assert error["param"] == "max_completion_tokens"
        assert error["message"] == "max_completion_tokens must be at least 1"
        error = await refused(h, CHAT, body, "chat.messages[1].role must be a word, got 'x y'", "chat.messages[1].role")
        assert error["param"] == "messages[1].role"
        assert error["message"] == "messages[1].role must be a word, got 'x y'"


@pytest.mark.parametrize("path", [COMPLETION, CHAT, RESPONSE])
async def test_a_prompt_of_too_many_tokens_is_said_in_openai_s_words(path: str) -> None:
    async with http() as h:
        error = await refused(h, path, ASK[path], "prompt has 900 tokens, more than", "prompt", CONTEXT_LENGTH_EXCEEDED)
        assert (error["code"], error["param"]) == ("context_length_exceeded", PROMPTS[path])
        assert error["message"].startswith(f"{PROMPTS[path]} has 900 tokens")


async def test_ids_that_are_too_many_are_refused_in_the_gateway_with_the_same_words() -> None:
    async with http() as h:
        for path, body in ((COMPLETION, {"prompt": [5] * 501}), (EMBEDDING, {"input": [5] * 501})):
            status, error = await h.refusal(path, body)
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", PROMPTS[path])
            assert "501 tokens, more than the maximum context length allows: max_input_length=500" in error["message"]


async def test_anthropic_s_clients_read_that_a_prompt_is_too_long() -> None:
    async with http() as h:
        body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        too_many = "prompt has 900 tokens, more than the maximum context length allows: max_input_length=500"
        error = await refused(h, "/v1/messages", body, too_many, "prompt", CONTEXT_LENGTH_EXCEEDED)
        assert error["message"].startswith("prompt is too long: messages has 900 tokens")
        assert error["param"] == "messages"


async def test_a_question_that_is_refused_has_the_client_s_name_too() -> None:
    async with http() as h:
        asked = h.post(TOKENIZE, {"messages": HI})
        _, question = await h.troupe.asked(EncodeRequest)
        field = "chat.messages[1].role"
        h.troupe.tell(RequestRejected(question.request_id, RejectCode.INVALID_ARGUMENT, f"{field} is bad", field))
        error = (await asked).json()["error"]
        assert (error["param"], error["message"]) == ("messages[1].role", "messages[1].role is bad")


async def test_grpc_says_the_reason_in_its_metadata() -> None:
    async with front() as f:
        call = f.inference.Generate(inference_pb2.GenerateRequest(token_ids={"ids": [5] * 501}))
        told = dict((await failure(call)).trailing_metadata())
        assert (told["error-field"], told["error-reason"]) == ("prompt", "context_length_exceeded")


async def test_wrong_types_are_named_by_their_place() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"messages": [HI[0], {"content": "x"}]}, "messages[1].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
         "messages[0].content[0].text"),
        (CHAT, {"messages": HI, "stop": ["a", 5]}, "stop[1]"),
        (CHAT, {"messages": HI, "logit_bias": {"5": "x"}}, "logit_bias"),
        (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (CHAT, {"messages": HI, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        (RESPONSE, {"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        (RESPONSE, {"instructions": "x", "input": [{"role": "user", "content": [{"type": "image"}]}]},
         "input[0].content[0]"),
        (TOKENIZE, {"messages": [{"role": "user"}, {}]}, "messages[1].role"),
    ]  # fmt: skip
    async with http() as h:
        for path, body, param in cases:
            status, error = await h.refusal(path, body)
            assert (status, error["param"]) == (400, param), error
            assert error["message"].startswith(param)


async def refused(h: Http, path: str, body: Any, message: str, field: str, reason: str = "") -> dict[str, Any]:
    """The error of a request that the troupe refuses."""
    asked = h.post(path, body)
    request = await h.troupe.request()
    code = RejectCode.INVALID_ARGUMENT
    h.troupe.tell(RequestRejected(request.header.request_id, code, message, field, reason=reason))
    response = await asked
    assert response.status_code == 400
    found: dict[str, Any] = response.json()["error"]
    return found
