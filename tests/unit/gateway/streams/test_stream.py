"""One stream and the journal of streams: what is queued, cut, counted and sent, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from services.gateway.bus.refusals import unavailable
from services.gateway.streams.journal import StreamJournal
from services.gateway.streams.stream import Stream, StreamDelta
from shared.errors import ProtocolError, RequestError
from shared.messages import FinishReason, RequestHeader, SequenceText, TokenizeRequest
from shared.sampling import SamplingParams


def header(request_id: str = "r", **more: Any) -> RequestHeader:
    return RequestHeader(request_id, "memory://gateway", **more)


def news(text: str, tokens: list[int], at: tuple[int, int]) -> SequenceText:
    return SequenceText("r", 0, token_offset=at[0], text_offset=at[1], text=text, token_ids=tokens)


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
    journal = StreamJournal(max_streams=2, max_bytes=15)
    first = make_stream()
    journal.add(first)
    with pytest.raises(RequestError, match="bytes of prompts"):
        journal.add(make_stream())
    journal.remove(first)
    journal.remove(first)
    assert (len(journal), journal.num_bytes) == (0, 0)


@pytest.mark.parametrize("at", [(3, 0), (0, 3)], ids=["tokens", "characters"])
def test_a_hole_in_tokens_or_in_characters_alone_is_one(at: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError):
        make_stream().accept(news("z", [9], at))


def test_a_delta_of_ids_alone_is_empty_to_a_client_that_wants_none() -> None:
    assert StreamDelta(0).empty and StreamDelta(0, token_ids=[1]).empty
    assert not StreamDelta(0, text=["a"]).empty and not StreamDelta(0, end=news("", [], (0, 0))).empty


def test_streams_are_found_by_label_within_their_tenant() -> None:
    journal = StreamJournal(max_streams=9, max_bytes=1 << 20)
    for request_id, label, tenant in (("a", "x", "t"), ("b", "x", "u"), ("c", "", "t")):
        request = TokenizeRequest(header(request_id, label=label, tenant=tenant), SamplingParams(), text="")
        journal.add(Stream(request, "memory://tokenizer"))

    def found(**wanted: str) -> list[str]:
        return [stream.header.request_id for stream in journal.find(**wanted)]

    assert found(label="x", tenant="t") == ["a"] and found(label="x", tenant="v") == []
    assert found(label="", tenant="t") == [], "without a label none is meant"
    assert found(request_id="b") == ["b"] and found(request_id="d") == []
