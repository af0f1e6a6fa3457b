"""Long texts in threads: tenants take turns, short ones wait for nothing, and what was aborted is not begun with."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from services.tokenizer.confined.encoders import HUGE_TEXT
from services.tokenizer.lanes import Lane
from shared.messages import (
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    EncodeResult,
    PiecesRequest,
    PiecesResult,
)
from shared.packing import pack_tokens, unpack_tokens
from shared.requests.grammar import Grammar, GrammarKind
from tests.unit.tokenizer.bench import GATEWAY, bench, text


async def test_tenants_take_turns() -> None:
    lane, order, gate = Lane(1, "test"), list[str](), threading.Event()
    first = asyncio.create_task(lane.turn("greedy", gate.wait))
    await asyncio.sleep(0)
    queued = [
        asyncio.create_task(lane.turn(tenant, lambda name=name: order.append(name)))  # type: ignore[misc]
        for tenant, name in (("greedy", "g1"), ("greedy", "g2"), ("greedy", "g3"), ("modest", "m1"), ("other", "o1"))
    ]
    await asyncio.sleep(0)
    assert lane.slots.num_waiting == 5
    gate.set()
    await asyncio.gather(first, *queued)
    assert order == ["g1", "m1", "o1", "g2", "g3"]
    lane.close()


async def test_one_that_gives_up_its_turn_passes_it_on() -> None:
    lane, gate = Lane(1, "test"), threading.Event()
    first = asyncio.create_task(lane.turn("a", gate.wait))
    await asyncio.sleep(0)
    second, third = (asyncio.create_task(lane.turn("a", lambda: None)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    gate.set()
    await asyncio.gather(first, third)
    with pytest.raises(asyncio.CancelledError):
        await second
    assert lane.slots.num_waiting == 0
    assert await asyncio.wait_for(lane.turn("b", lambda: 5), 5) == 5, "the thread is free again"
    lane.close()


async def test_others_are_served_while_a_huge_text_is_tokenized_and_its_ids_are_the_same() -> None:
    async with bench() as b:
        huge = "word " * (HUGE_TEXT // 5 + 10)
        b.send(EncodeRequest("huge", GATEWAY, text=huge, tenant="greedy"))
        b.send(EncodeRequest("long", GATEWAY, text="word " * 4_000, tenant="modest"))
        b.send(EncodeRequest("short", GATEWAY, text="word"), text("Once"))
        assert (await b.added()).header.request_id == "r"
        found = await b.next(b.gateway, 2)
        assert {answer.request_id for answer in found} == {"long", "short"}
        async with asyncio.timeout(60):
            while not (answers := [m for m in await b.gateway.recv_batch() if isinstance(m, EncodeResult)]):
                pass
        assert answers[0].request_id == "huge"
        assert unpack_tokens(answers[0].token_ids) == b.model.encode(huge)


async def test_megabytes_of_ids_do_not_hold_the_mailbox() -> None:
    async with bench() as b:
        began, gate = threading.Event(), threading.Event()
        decode = b.model.decode

        def slow(token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            if len(token_ids) > 70_000:
                began.set()
                gate.wait(20)
                return "huge"
            return decode(token_ids, skip_special_tokens=skip_special_tokens)

        b.model.decode = slow  # type: ignore[method-assign]
        try:
            b.send(DecodeRequest("huge", GATEWAY, pack_tokens([1578] * 80_000)))
            await asyncio.to_thread(began.wait, 10)
            b.send(DecodeRequest("short", GATEWAY, pack_tokens([1578])))
            (answer,) = await b.next(b.gateway)
            assert isinstance(answer, DecodeResult) and (answer.request_id, answer.text) == ("short", "Hello")
            gate.set()
            (answer,) = await b.next(b.gateway)
            assert isinstance(answer, DecodeResult) and answer.text == "huge"
        finally:
            gate.set()
            del b.model.decode


@pytest.mark.parametrize(
    "more", [{}, {"grammar": Grammar(GrammarKind.CHOICE, '["a"]')}], ids=["plain", "with a format"]
)
async def test_many_words_that_are_not_wanted_do_not_hold_the_mailbox(more: dict[str, Any]) -> None:
    async with bench() as b:
        words = [f"{place} {'word ' * 50}" for place in range(200)]
        wanted = b.actor.rules.bad_words(text("Once", bad_words=words).params)
        began, gate = threading.Event(), threading.Event()
        encode = b.model.encode_plain

        def slow(text: str) -> list[int]:
            if text == words[0]:
                began.set()
                gate.wait(5)
            return encode(text)

        b.model.encode_plain = slow  # type: ignore[method-assign]
        try:
            b.send(text("Once", "many", bad_words=words, **more))
            assert await asyncio.to_thread(began.wait, 20)
            b.send(text("Once", "short", bad_words=["word"]))
            assert (await b.added()).header.request_id == "short"
            gate.set()
            added = await b.added()
            assert (added.header.request_id, added.params.bad_words_token_ids) == ("many", wanted)
        finally:
            gate.set()
            del b.model.encode_plain


async def test_pieces_of_many_tokens_leave_time_to_others() -> None:
    async with bench() as b:
        b.send(PiecesRequest("many", GATEWAY, pack_tokens([1578] * 100_000)), DecodeRequest("one", GATEWAY, b""))
        first, second = await b.next(b.gateway, 2)
        assert isinstance(first, DecodeResult) and isinstance(second, PiecesResult)
        assert len(second.pieces) == 100_000 and second.pieces[0].strip() == b"Hello"


async def test_pieces_as_the_vocabulary_writes_them() -> None:
    async with bench() as b:
        ids = b.model.encode_plain(" Hello")
        for as_written, wanted in ((True, "ĠHello"), (False, " Hello")):
            b.send(PiecesRequest("one", GATEWAY, pack_tokens(ids), as_written))
            (answer,) = await b.next(b.gateway)
            assert isinstance(answer, PiecesResult) and b"".join(answer.pieces).decode() == wanted
