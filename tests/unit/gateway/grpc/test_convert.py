"""Conversions, metadata, statuses and the journal, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import msgspec
import pytest

from protos.pageant.v1.inference_pb2 import GenerateRequest
from protos.pageant.v1.inference_pb2 import SamplingParams as ProtoSampling
from services.gateway.access.header import cache_salt, make_header, read_metadata, seeded
from services.gateway.bus.refusals import MAX_DETAIL_CHARS, details, unavailable
from services.gateway.grpc import convert, status
from services.gateway.streams.journal import Journal
from services.gateway.streams.stream import Stream
from shared.clock import steady_time
from shared.errors import ProtocolError, RejectCode, RequestError
from shared.grammar import Grammar, GrammarKind
from shared.messages import FinishReason, RequestHeader, SequenceText, TokenizeRequest
from shared.packing import unpack_tokens
from shared.sampling import SamplingParams

EVERYTHING: dict[str, Any] = {
    "temperature": 0.1, "top_k": -1, "top_p": 0.9, "min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": -0.5,
    "repetition_penalty": 1.1, "logit_bias": {7: 2.0}, "allowed_token_ids": [1, 2], "bad_words": ["no"],
    "bad_words_token_ids": [[3, 4]], "min_tokens": 1, "max_tokens": 9, "stop": ["."], "stop_token_ids": [5],
    "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False, "seed": -3, "n": 2,
    "logprobs": 0, "prompt_logprobs": 3, "detokenize": False, "speculate": False,
    "grammar": Grammar(GrammarKind.REGEX, "a+"),
}  # fmt: skip


def header(request_id: str = "r", **more: Any) -> RequestHeader:
    return RequestHeader(request_id, "memory://gateway", **more)


def news(text: str, tokens: list[int], at: tuple[int, int]) -> SequenceText:
    return SequenceText("r", 0, token_offset=at[0], text_offset=at[1], text=text, token_ids=tokens)


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
    instead = {"beam", "pooling"}  # of sampling, each with tests of its own
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


def test_inputs() -> None:
    ids = convert.tokenize_request(GenerateRequest(token_ids={"ids": [1, -2]}), header(), SamplingParams(), 9)
    assert ids.token_ids is not None and unpack_tokens(ids.token_ids) == [1, -2] and ids.text is None
    empty = convert.tokenize_request(GenerateRequest(text=""), header(), SamplingParams(), 9)
    assert empty.text == ""


def test_a_trace_is_carried_on_or_begun() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    assert read_metadata([("traceparent", f"00-{trace}-00f067aa0ba902b7-01")]).trace_id == trace
    for bad in ("", "00-xyz", f"00-{'0' * 32}-00f067aa0ba902b7-01"):
        fresh = read_metadata([("traceparent", bad), ("x-tenant", "t"), ("blob-bin", b"\0")])
        assert len(fresh.trace_id) == 32 and fresh.trace_id not in (trace, "0" * 32) and fresh.tenant == "t"


def test_the_header_is_the_servers_own() -> None:
    call = read_metadata([("x-tenant", "t")])
    before = steady_time()
    first, second = (
        make_header(call, gateway="g", label="l", priority=2, now=100.0, remaining=left) for left in (5.0, None)
    )
    assert first.request_id != second.request_id and first.label == "l"
    assert first.deadline is not None and before <= first.deadline - 5.0 <= steady_time() and second.deadline is None
    assert cache_salt("") == "" and cache_salt("a") != cache_salt("b") and cache_salt("a") == cache_salt("a")


def test_a_seed_is_drawn_only_where_none_was_given() -> None:
    assert seeded(SamplingParams(seed=5)).seed == 5
    assert seeded(SamplingParams()).seed != seeded(SamplingParams()).seed


@pytest.mark.parametrize("code", list(RejectCode))
def test_every_reason_has_a_status(code: RejectCode) -> None:
    assert isinstance(status.STATUS[code], grpc.StatusCode)


def test_details_begin_with_the_field_and_stay_short() -> None:
    assert details(RequestError("n must be 1", field="n")) == "n must be 1"
    assert details(RequestError("must be 1", field="n")) == "n: must be 1"
    assert len(details(RequestError("x" * 9999))) == MAX_DETAIL_CHARS
    assert status.trailing_metadata(unavailable("away")) == (("retry-after-ms", "500"),)


def make_stream(**params: Any) -> Stream:
    return Stream(TokenizeRequest(header(), SamplingParams(**params), text="x" * 10), "memory://tokenizer")


async def test_overlapping_news_is_cut_to_what_is_new() -> None:
    stream = make_stream()
    stream.accept(news("ab", [1, 2], (0, 0)))
    stream.accept(news("bc", [2, 3], (1, 1)))
    stream.wake(lambda: None)
    (delta,) = await stream.take()
    assert "".join(delta.text) == "abc" and delta.token_ids == [1, 2, 3]
    with pytest.raises(ProtocolError):
        stream.accept(news("z", [9], (5, 5)))
    with pytest.raises(ProtocolError):
        stream.accept(msgspec.structs.replace(news("z", [9], (0, 0)), index=3))


def test_verified_drafts_are_counted_once_for_each_finished_sequence() -> None:
    stream = make_stream(n=2)
    for index in range(2):
        growing = msgspec.structs.replace(news("a", [1], (0, 0)), index=index, num_draft_tokens=1)
        stream.accept(growing)
        last = msgspec.structs.replace(news("b", [2], (1, 1)), index=index, finish_reason=FinishReason.LENGTH)
        last = msgspec.structs.replace(last, num_draft_tokens=5 + index, num_accepted_tokens=3)
        stream.accept(last)
        stream.accept(last)  # told again, as after a detokenizer's death
    assert (stream.num_draft_tokens, stream.num_accepted_tokens) == (11, 6)


async def test_what_came_before_an_error_is_still_sent() -> None:
    stream = make_stream()
    stream.accept(news("ab", [1], (0, 0)))
    stream.fail(unavailable("first"))
    stream.fail(unavailable("second"))
    assert len(await stream.take()) == 1
    assert await stream.take() == [] and str(stream.error) == "first"


async def test_output_leaves_when_its_stream_is_woken_and_all_at_once() -> None:
    stream = make_stream()
    stream.wake(lambda: None)  # nothing is there yet: no end of the stream
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.accept(news("ab", [1], (0, 0)))
    await asyncio.sleep(0.01)
    assert not taking.done()
    stream.accept(news("c", [2], (1, 2)))
    stream.wake(lambda: None)
    (delta,) = await taking
    assert "".join(delta.text) == "abc" and delta.token_ids == [1, 2]


async def test_a_stream_tells_when_it_has_sent_and_is_not_woken_while_it_sends() -> None:
    stream, sent = make_stream(), 0

    def count() -> None:
        nonlocal sent
        sent += 1

    assert not stream.wake(count), "nothing to send"
    stream.accept(news("ab", [1], (0, 0)))
    assert stream.wake(count)
    await stream.take()
    stream.accept(news("c", [2], (1, 2)))
    assert not stream.wake(count) and sent == 0, "its reader is slow: it is sending what came before"
    await stream.take()
    assert sent == 1
    stream.accept(news("d", [3], (2, 3)))
    assert not stream.wake(count), "nor has it sent what came meanwhile, which it took unasked"
    await stream.take()
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.accept(news("e", [4], (3, 4)))
    assert stream.wake(count)
    await waiting
    assert sent == 1
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert sent == 2
    waiting.cancel()


def test_the_journal_keeps_within_its_bounds() -> None:
    journal = Journal(max_streams=2, max_bytes=15)
    first = make_stream()
    journal.add(first)
    with pytest.raises(RequestError, match="bytes of prompts"):
        journal.add(make_stream())
    journal.remove(first)
    journal.remove(first)
    assert (len(journal), journal.num_bytes) == (0, 0)


NOW = 1_795_261_499.25


@pytest.mark.parametrize("text", ["t=1795261498.75", "1795261498.75", "t=1795261498750", "1795261498750000"])
def test_a_request_start_is_read_as_proxies_write_it(text: str) -> None:
    call = read_metadata([("x-request-start", text)])
    header = make_header(call, gateway="g", label="", priority=0, now=NOW, remaining=2.0)
    assert header.sent_time == pytest.approx(NOW - 0.5, abs=1e-4)
    assert header.arrival_time == NOW and header.deadline is not None and header.deadline <= steady_time() + 2.0


@pytest.mark.parametrize(
    "text", ["", "soon", "t=", "-1795261498", "1e9", "nan", "t=1795261500", "1795261000", "9" * 99]
)
def test_a_request_start_that_cannot_be_is_none(text: str) -> None:
    call = read_metadata([("x-request-start", text)])
    assert make_header(call, gateway="g", label="", priority=0, now=NOW, remaining=None).sent_time == 0.0
