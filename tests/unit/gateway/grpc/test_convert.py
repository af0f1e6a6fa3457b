"""Conversions between gRPC's messages and ours, and statuses, without a server."""

from __future__ import annotations

from typing import Any

import grpc
import msgspec
import pytest

from protos.pageant.v1.inference_pb2 import GenerateRequest
from protos.pageant.v1.inference_pb2 import SamplingParams as ProtoSampling
from services.gateway.bus.refusals import MAX_DETAIL_BYTES, details, unavailable
from services.gateway.grpc import convert, status
from shared.errors import RejectCode, RequestError
from shared.messages import RequestHeader
from shared.packing import unpack_tokens
from shared.requests.grammar import Grammar, GrammarKind
from shared.requests.sampling import SamplingParams

EVERYTHING: dict[str, Any] = {
    "temperature": 0.1, "top_k": -1, "top_p": 0.9, "min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": -0.5,
    "repetition_penalty": 1.1, "logit_bias": {7: 2.0}, "allowed_token_ids": [1, 2], "bad_words": ["no"],
    "bad_words_token_ids": [[3, 4]], "min_tokens": 1, "max_tokens": 9, "stop": ["."], "stop_token_ids": [5],
    "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False, "seed": -3, "n": 2,
    "logprobs": 2, "logprob_token_ids": [9, 5], "prompt_logprobs": 3, "detokenize": False, "speculate": False,
    "grammar": Grammar(GrammarKind.REGEX, "a+"),
}  # fmt: skip


def header(request_id: str = "r", **more: Any) -> RequestHeader:
    return RequestHeader(request_id, "memory://gateway", **more)


def test_nothing_given_is_every_default() -> None:
    assert convert.sampling_from_proto(ProtoSampling()) == SamplingParams()


def test_every_sampling_field_crosses() -> None:
    nested = {
        "allowed_token_ids": {"ids": [1, 2]},
        "bad_words_token_ids": [{"ids": [3, 4]}],
        "grammar": {"regex": "a+"},
    }
    crossed = msgspec.structs.asdict(convert.sampling_from_proto(ProtoSampling(**(EVERYTHING | nested))))
    assert {name: crossed[name] for name in EVERYTHING} == EVERYTHING
    instead = {"beam", "pooling", "thinking"}  # each with tests of its own; the last needs a format of reasoning
    assert set(EVERYTHING) == {field.name for field in msgspec.structs.fields(SamplingParams)} - instead


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json_schema": "{}"}, GrammarKind.JSON_SCHEMA, "{}"),
        ({"json_object": True}, GrammarKind.JSON_OBJECT, ""),
        ({"choice": {"texts": ["a", 'b"']}}, GrammarKind.CHOICE, '["a","b\\""]'),
        ({"grammar": "start: /a/"}, GrammarKind.GRAMMAR, "start: /a/"),
    ],
)
def test_every_kind_of_grammar_crosses(given: dict[str, Any], kind: GrammarKind, text: str) -> None:
    params = convert.sampling_from_proto(ProtoSampling(grammar=given))
    assert params.grammar == Grammar(kind, text, "grammar")


def test_a_grammar_without_a_kind_is_refused() -> None:
    for given in ({}, {"json_object": False}):
        with pytest.raises(RequestError) as caught:
            convert.sampling_from_proto(ProtoSampling(grammar=given))
        assert caught.value.field == "grammar"


def test_zero_is_given_and_an_empty_allow_list_too() -> None:
    params = convert.sampling_from_proto(ProtoSampling(temperature=0, max_tokens=0, allowed_token_ids={}))
    assert (params.temperature, params.max_tokens, params.allowed_token_ids) == (0.0, 0, [])


def test_tokens_that_are_named_count_once_and_in_place_of_the_likeliest() -> None:
    params = convert.sampling_from_proto(ProtoSampling(logprobs=0, logprob_token_ids=[9, 5, 9]))
    assert (params.logprobs, params.logprob_token_ids) == (2, [9, 5])
    with pytest.raises(RequestError, match="with logprobs") as caught:
        convert.sampling_from_proto(ProtoSampling(logprob_token_ids=[9]))
    assert caught.value.field == "logprob_token_ids"


def test_inputs() -> None:
    ids = convert.tokenize_request(GenerateRequest(token_ids={"ids": [1, -2]}), header(), SamplingParams(), 9)
    assert ids.token_ids is not None and unpack_tokens(ids.token_ids) == [1, -2] and ids.text is None
    empty = convert.tokenize_request(GenerateRequest(text=""), header(), SamplingParams(), 9)
    assert empty.text == ""


@pytest.mark.parametrize("code", list(RejectCode))
def test_every_reason_has_a_status(code: RejectCode) -> None:
    assert isinstance(status.STATUS[code], grpc.StatusCode)


def test_details_begin_with_the_field_and_stay_short() -> None:
    assert details(RequestError("n must be 1", field="n")) == "n must be 1"
    assert details(RequestError("must be 1", field="n")) == "n: must be 1"
    for character in "xé模😀":
        text = details(RequestError(character * 9999))
        assert text.lstrip(character) == "…"
        assert MAX_DETAIL_BYTES - 4 < len(text.encode()) <= MAX_DETAIL_BYTES
    assert details(RequestError("é" * (MAX_DETAIL_BYTES // 2))) == "é" * (MAX_DETAIL_BYTES // 2)
    assert status.trailing_metadata(unavailable("away")) == (("retry-after-ms", "500"),)
