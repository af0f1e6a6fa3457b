"""One stream and the journal of streams: what is queued, cut, counted and sent, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from services.gateway.bus.refusals import unavailable
from services.gateway.streams.journal import StreamJournal
from services.gateway.streams.latency import StreamLatency
from services.gateway.streams.stream import Position, Stream, StreamDelta
from shared.errors import ProtocolError, RequestError
from shared.messages import AttachRequest, FinishReason, RequestHeader, SequenceText, TokenizeRequest
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams


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


def finishing(text: str, tokens: list[int], index: int = 0, **more: Any) -> SequenceText:
    return SequenceText("r", index, 0, 0, text, tokens, finish_reason=FinishReason.STOP, **more)


@pytest.mark.parametrize(("n", "count"), [(0, 1), (1, 1), (3, 3)])
def test_each_sequence_that_is_asked_for_has_a_journal(n: int, count: int) -> None:
    stream = make_stream(n=n)
    assert [sequence.index for sequence in stream.sequences] == list(range(count))
    for index in (-1, count):
        with pytest.raises(ProtocolError, match=f"no sequence {index}"):
            stream.accept(msgspec.structs.replace(news("a", [1], (0, 0)), index=index))


async def test_what_a_client_has_of_some_sequences_is_not_sent_again() -> None:
    request = TokenizeRequest(header(), SamplingParams(n=2), text="x")
    stream = Stream(request, "memory://tokenizer", [Position(1, 1)])
    assert stream.is_return and not make_stream().is_return and Stream(request, "", []).is_return
    for index in range(2):
        stream.accept(msgspec.structs.replace(news("ab", [1, 2], (0, 0)), index=index))
    stream.wake(lambda: None)
    assert [("".join(delta.text), delta.token_ids) for delta in await stream.take()] == [("b", [2]), ("ab", [1, 2])]


def test_a_stream_is_answered_by_tokens_or_by_an_end_without_any() -> None:
    stream = make_stream(n=2)

    def state() -> tuple[bool, bool, bool, int]:
        return stream.answered, stream.finished, stream.ended, stream.num_output_tokens

    assert state() == (False, False, False, 0)
    stream.accept(finishing("", [], index=1))
    assert state() == (True, False, False, 0)
    stream.accept(news("a", [1, 2], (0, 0)))
    assert state() == (True, False, False, 2)
    stream.accept(msgspec.structs.replace(finishing("", [3]), token_offset=2, text_offset=1))
    assert state() == (True, True, True, 3)


def test_an_error_ends_a_stream_that_has_not_ended_and_no_other() -> None:
    failed, done = make_stream(), make_stream()
    failed.fail(unavailable("gone"))
    assert failed.ended and not failed.finished and not failed.answered
    failed.accept(news("late", [1], (0, 0)))
    assert failed.num_output_tokens == 0 and failed.num_unread == 0
    done.accept(finishing("a", [1]))
    done.fail(unavailable("gone"))
    assert done.error is None


def test_a_stream_knows_what_its_news_said() -> None:
    stream = make_stream(n=2)
    counts = stream.num_prompt_tokens, stream.num_cached_tokens, stream.num_draft_tokens, stream.num_accepted_tokens
    assert counts == (0, 0, 0, 0) and stream.num_output_tokens == 0 and not stream.is_resumed
    first = msgspec.structs.replace(news("a", [1], (0, 0)), num_prompt_tokens=7, num_cached_tokens=4, fingerprint="fp")
    stream.accept(first)
    assert (stream.num_prompt_tokens, stream.num_cached_tokens, stream.fingerprint) == (7, 4, "fp")
    stream.accept(msgspec.structs.replace(first, index=1, num_prompt_tokens=0, num_cached_tokens=2, fingerprint="no"))
    assert (stream.num_prompt_tokens, stream.num_cached_tokens, stream.fingerprint) == (7, 4, "fp")
    assert stream.finish_reason == ""
    stream.accept(msgspec.structs.replace(finishing("", [2]), token_offset=1, text_offset=1))
    assert stream.finish_reason == "stop"
    assert stream.num_unread == 2 + 3 * 4, "two characters and three ids wait"


def test_a_resumed_request_says_how_far_each_sequence_is() -> None:
    stream = make_stream(n=2)
    assert stream.next_request == stream.request and not stream.is_resumed
    stream.accept(msgspec.structs.replace(news("ab", [1, 2], (0, 0)), fingerprint="fp"))
    stream.accept(finishing("whole", [5], index=1))
    stream.is_resumed = True
    again = stream.next_request
    assert isinstance(again, TokenizeRequest) and again.is_resumed and again.fingerprint == "fp"
    assert again.sent_token_ids == [pack_tokens([1, 2]), b""]
    assert again.sent_text_lengths == [2, 5] and again.sent_finished == [False, True]
    assert again.header.time_left is None, "there is no deadline"


def test_a_return_is_attached_under_the_address_that_holds_now() -> None:
    stream = Stream(TokenizeRequest(header(), SamplingParams(), text="x"), "", [Position()])
    stream.readdress("memory://elsewhere")
    assert stream.next_request == AttachRequest("r", "memory://elsewhere")
    assert stream.header.gateway == stream.request.header.gateway == "memory://elsewhere"


async def test_an_overrun_stream_sends_nothing_more_and_waits_for_no_reader() -> None:
    stream, never = make_stream(), asyncio.Event()
    stream.accept(news("ab", [1], (0, 0)))

    async def write() -> None:
        await never.wait()

    delivering = asyncio.create_task(stream.deliver(write()))
    await asyncio.sleep(0)
    stream.overrun(unavailable("too slow"))
    stream.overrun(unavailable("too slow"))
    async with asyncio.timeout(10):
        await delivering
    assert stream.num_unread == 0 and await stream.take() == []


async def test_a_time_out_of_the_sender_itself_is_an_error() -> None:
    async def write() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await make_stream().deliver(write())


async def test_an_overrun_before_delivery_begins_ends_it_when_its_sender_returns() -> None:
    stream, written = make_stream(), []

    async def write() -> None:
        written.extend(await stream.take())

    stream.overrun(unavailable("too slow"))
    await stream.deliver(write())
    assert written == [] and stream.ended


class Account(StreamLatency):
    """Notes when writing began and ended."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.events: list[str] = []

    def write_began(self) -> None:
        self.events.append("began")

    def write_ended(self) -> None:
        self.events.append("ended")


async def test_writing_lasts_from_taking_output_until_more_is_asked_for() -> None:
    stream, took = make_stream(), []
    account = stream.latency = Account()
    stream.on_output = lambda: took.append(len(account.events))
    stream.accept(finishing("ab", [1]))
    stream.wake(lambda: None)
    assert len(await stream.take()) == 1
    assert account.events == ["ended", "began"] and took == [1]

    async def work() -> None:
        account.events.append("work")

    await stream.before_writing(work())
    assert account.events[2:] == ["ended", "work", "began"]
    assert await stream.take() == []
    assert account.events[5:] == ["ended"] and took == [1], "nothing was taken: nothing is written"


async def test_without_an_account_writing_is_the_same() -> None:
    stream, done = make_stream(), []

    async def work() -> None:
        done.append(1)

    await stream.before_writing(work())
    stream.accept(finishing("ab", [1]))
    stream.wake(lambda: None)
    assert done == [1] and len(await stream.take()) == 1 and await stream.take() == []


async def test_output_taken_begins_a_new_delta() -> None:
    stream = make_stream()
    stream.accept(news("a", [1], (0, 0)))
    stream.wake(lambda: None)
    (first,) = await stream.take()
    stream.accept(news("b", [2], (1, 1)))
    stream.wake(lambda: None)
    (second,) = await stream.take()
    assert first is not second and (first.text, second.text) == (["a"], ["b"])


async def test_a_sender_that_has_ended_its_stream_is_not_called_for_what_it_never_took() -> None:
    stream, sent = make_stream(), []
    stream.accept(finishing("a", [1]))
    assert stream.wake(lambda: sent.append(1))
    await stream.take()
    assert sent == []
    assert await stream.take() == [] and sent == [1]
    assert await stream.take() == [] and sent == [1], "once"
