"""The detokenizer as an actor: batches in, one batch per gateway out, and its word to the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.detokenizer.actor import DetokenizerActor
from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.table import StreamTable
from shared.config import Settings
from shared.messages import (
    Fingerprint,
    FinishReason,
    GatewayInbox,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Message,
    OpenStream,
    RequestRejected,
    Roster,
    SchedulerInbox,
    SequenceTokens,
    ServiceName,
    StopMatched,
    StreamLost,
    TextBatch,
    TokenBatch,
)
from shared.transport import MemoryTransport
from tests.unit.detokenizer.models import BUNDLED, factory, opened, tokenizer

GATEWAYS = ("memory://gateway", "memory://other")
CHATTER = (Hello, Heartbeat, Goodbye)
NUM_TURNS = 20  # of the event loop: enough for all that an actor without threads has to do


class Bench:
    """A detokenizer among bare inboxes."""

    def __init__(self, decoders: DecoderFactory) -> None:
        self.network = MemoryTransport()
        self.scheduler = self.network.bind("scheduler", SchedulerInbox)
        self.gateways = {address: self.network.bind(address[9:], GatewayInbox) for address in GATEWAYS}
        self.actor = DetokenizerActor(self.network, Settings.of(heartbeat_interval=0.05), decoders, "detokenizer-1")
        self.outbox = self.network.outbox()

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.outbox.send("memory://detokenizer-1", message)
        self.outbox.flush()

    def roster(self, version: int, gateways: tuple[str, ...] = GATEWAYS, epoch: int = 1) -> None:
        members = [Member(ServiceName.GATEWAY, address, address, 1) for address in gateways]
        me = Member(ServiceName.DETOKENIZER, "detokenizer-1", "memory://detokenizer-1", 1)
        self.send(Roster(epoch, version, [*members, me]))

    async def heard(self, inbox: Any) -> list[Message]:
        """What an inbox got until the actor had nothing more to do."""
        for _ in range(NUM_TURNS):
            await asyncio.sleep(0)
        if not inbox._mail:
            return []
        return [message for message in await inbox.recv_batch() if not isinstance(message, CHATTER)]


@pytest.fixture
def decoders() -> DecoderFactory:
    return factory(BUNDLED)


@asynccontextmanager
async def bench(decoders: DecoderFactory) -> AsyncIterator[Bench]:
    made = Bench(decoders)
    task = asyncio.create_task(made.actor.run())
    made.roster(1)
    yield made
    made.actor.request_drain()
    async with asyncio.timeout(5):
        await task


def words(text: str) -> list[int]:
    return tokenizer(BUNDLED).encode_plain(text)


def tokens(
    ids: list[int], offset: int = 0, request_id: str = "r", finish: FinishReason | None = None
) -> SequenceTokens:
    return SequenceTokens(request_id, 0, offset, ids, finish_reason=finish)


async def test_one_batch_per_gateway(decoders: DecoderFactory) -> None:
    async with bench(decoders) as b:
        ids = words("one two")
        b.send(
            TokenBatch([opened("r"), opened("s"), opened("t", gateway=GATEWAYS[1])], [tokens(ids, request_id="r")]),
            TokenBatch([], [tokens(ids[:1], request_id="s"), tokens(ids, request_id="t")]),
        )
        (batch,) = await b.heard(b.gateways[GATEWAYS[0]])
        assert isinstance(batch, TextBatch)
        assert [(said.request_id, said.text) for said in batch.sequences] == [("r", "one two"), ("s", "one")]
        (batch,) = await b.heard(b.gateways[GATEWAYS[1]])
        assert isinstance(batch, TextBatch) and batch.sequences[0].request_id == "t"
        assert await b.heard(b.scheduler) == []


async def test_a_stop_string_ends_the_stream_once(decoders: DecoderFactory) -> None:
    async with bench(decoders) as b:
        ids = words("one two three four")
        b.send(TokenBatch([opened(stop=["three"])], [tokens(ids[:3])]))
        assert await b.heard(b.scheduler) == [StopMatched("r", 0, 3)]
        b.send(TokenBatch([], [tokens(ids[3:], 3)]))
        assert await b.heard(b.scheduler) == []  # neither lost nor stopped again
        (batch,) = await b.heard(b.gateways[GATEWAYS[0]])
        assert isinstance(batch, TextBatch)
        (said,) = batch.sequences
        assert (said.text, said.finish_reason, said.stop_reason) == ("one two ", FinishReason.STOP, "three")


async def test_a_stop_string_in_the_finish_is_no_news_to_the_scheduler(
    data_dir: Path, decoders: DecoderFactory
) -> None:
    async with bench(decoders) as b:
        ids = words("one two")
        b.send(TokenBatch([opened(stop=["two"])], [tokens(ids, finish=FinishReason.LENGTH)]))
        assert await b.heard(b.scheduler) == []
        assert not b.actor.table.streams


async def test_lost_streams_are_asked_for_and_opened_again(decoders: DecoderFactory) -> None:
    async with bench(decoders) as b:
        ids = words("one two three")
        b.send(TokenBatch([], [tokens(ids[:1]), tokens(ids[1:2], 1)]))
        assert await b.heard(b.scheduler) == [StreamLost("r", 0)]
        b.send(TokenBatch([opened()], [tokens(ids[:1])]), TokenBatch([], [tokens(ids[2:], 2)]))
        assert await b.heard(b.scheduler) == [StreamLost("r", 0)]
        b.send(TokenBatch([opened()], [tokens(ids, finish=FinishReason.LENGTH)]))
        assert await b.heard(b.scheduler) == []
        texts = await b.heard(b.gateways[GATEWAYS[0]])
        last = texts[-1]
        assert isinstance(last, TextBatch)
        assert (last.sequences[0].text, last.sequences[0].text_offset) == ("one two three", 0)


async def test_closed_streams_and_gateways_that_left_are_forgotten(decoders: DecoderFactory) -> None:
    async with bench(decoders) as b:
        ids = words("one two")
        b.send(TokenBatch([opened("r"), opened("s", gateway=GATEWAYS[1])], [tokens(ids[:1])], [("r", 0)]))
        await b.heard(b.scheduler)
        assert list(b.actor.table.streams) == [("s", 0)]
        b.roster(2, GATEWAYS[:1])
        b.send(TokenBatch([], [tokens(ids[1:], 1)]))
        assert await b.heard(b.scheduler) == []
        assert not b.actor.table.streams


async def test_a_new_scheduler_starts_afresh(decoders: DecoderFactory) -> None:
    async with bench(decoders) as b:
        b.send(TokenBatch([opened()], []))
        b.roster(1, epoch=2)
        await b.heard(b.scheduler)
        assert not b.actor.table.streams


@pytest.mark.parametrize("is_made", [False, True])
async def test_a_defect_in_one_stream_ends_that_request_only(decoders: DecoderFactory, is_made: bool) -> None:
    class Broken(DecoderFactory):
        defects = 1

        def make(self, *args: Any, **kwargs: Any) -> Any:
            self.defects -= 1
            assert self.defects or is_made
            return object() if self.defects == 0 else decoders.make(*args, **kwargs)

        def __init__(self) -> None:
            pass

    async with bench(Broken()) as b:
        ids = words("one two")
        b.send(TokenBatch([opened("r"), opened("s")], [tokens(ids), tokens(ids, request_id="s")]))
        texts, rejected = await b.heard(b.gateways[GATEWAYS[0]])
        assert isinstance(texts, TextBatch) and [said.request_id for said in texts.sequences] == ["s"]
        assert isinstance(rejected, RequestRejected) and rejected.request_id == "r"
        assert await b.heard(b.scheduler) == [StopMatched("r", 0, 2 if is_made else 0)]


def test_memory_of_closed_streams_is_bounded(decoders: DecoderFactory) -> None:
    table = StreamTable(decoders, max_closed=2)

    def ended(request_id: str) -> tuple[OpenStream, SequenceTokens]:
        return opened(request_id), tokens([1], request_id=request_id, finish=FinishReason.LENGTH)

    streams = [ended(request_id) for request_id in "abc"]
    table.apply(TokenBatch([stream for stream, _ in streams], [end for _, end in streams]))
    table.take_notices()
    table.apply(TokenBatch([], [end for _, end in streams]))
    assert table.take_notices() == [StreamLost("a", 0)]


def test_a_stream_that_was_closed_and_opened_again_may_be_lost_as_any_other(decoders: DecoderFactory) -> None:
    table = StreamTable(decoders)
    table.apply(TokenBatch([opened("r")], [tokens([1])], [("r", 0)]))
    table.apply(TokenBatch([], [tokens([1], 1)]))
    assert table.take_notices() == [], "it is closed, and some tokens were under way"
    table.apply(TokenBatch([opened("r")], [tokens([1])]))
    for _ in range(2):
        table.apply(TokenBatch([], [tokens([1], 2)]))
        assert table.take_notices() == [StreamLost("r", 0)]


async def test_what_leaves_beside_a_gateway_takes_no_stream_with_it(decoders: DecoderFactory) -> None:
    async with bench(decoders) as b:
        here = [Member(ServiceName.GATEWAY, address, address, 1) for address in GATEWAYS]
        me = Member(ServiceName.DETOKENIZER, "detokenizer-1", "memory://detokenizer-1", 1)
        twin = Member(ServiceName.WORKER, "w", GATEWAYS[0], 1)  # of another service, at the same address
        b.send(Roster(1, 2, [*here, me, twin]), TokenBatch([opened("r")], []))
        await b.heard(b.scheduler)
        b.send(Roster(1, 3, [*here, me]))
        await b.heard(b.scheduler)
        assert list(b.actor.table.streams) == [("r", 0)]
        again = Member(ServiceName.GATEWAY, GATEWAYS[0], GATEWAYS[0], 2)
        b.send(Roster(1, 4, [again, here[1], me]))
        await b.heard(b.scheduler)
        assert list(b.actor.table.streams) == [("r", 0)], "it is reached where it was"
        b.send(Roster(1, 5, [here[1], me]))
        await b.heard(b.scheduler)
        assert not b.actor.table.streams


async def test_what_is_sent_again_or_refused_reaches_the_actor(decoders: DecoderFactory) -> None:
    async with bench(decoders) as b:
        b.send(TokenBatch([opened("r")], []))
        await b.heard(b.scheduler)
        b.actor.on_forgotten()
        assert not b.actor.table.streams and b.actor.fingerprint() is None
        text = Fingerprint(tokenizer="of this one")
        other = DetokenizerActor(b.network, Settings.of(), decoders, "detokenizer-2", text)
        assert other.fingerprint() == text
