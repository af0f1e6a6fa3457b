"""The tokenizer as an actor: requests in; tokenized requests, answers and refusals out."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from services.tokenizer.confined.renderers import NUM_RENDERERS
from services.tokenizer.lanes import LONG_TEXT
from shared.clocks.clock import steady_time
from shared.errors import RejectCode
from shared.messages import (
    AbortRequest,
    AddRequest,
    ChatMessage,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    EncodeResult,
    Roster,
    TokenizeRequest,
    ToolCall,
)
from shared.packing import pack_tokens, unpack_tokens
from shared.requests.sampling import SamplingParams
from tests.unit.tokenizer.bench import GATEWAY, TEMPLATE, bench, chat, header, text


async def test_text() -> None:
    async with bench() as b:
        b.send(text("Hello", stop=["x"], seed=7))
        added = await b.added()
        assert unpack_tokens(added.prompt_token_ids) == [0, 1578]
        assert added.header == header()
        assert (added.params.max_tokens, added.params.temperature, added.params.seed) == (16, 0.7, 7)
        assert added.eos_token_ids == [0, 3]
        assert added.tokenized_time == pytest.approx(time.time(), abs=5)


async def test_token_ids_and_what_was_sent_before_go_through_untouched() -> None:
    async with bench() as b:
        ids, sent = pack_tokens([5, 6, 31999]), [pack_tokens([9])]
        b.send(TokenizeRequest(header(), SamplingParams(), token_ids=ids, sent_token_ids=sent, sent_text_lengths=[3]))
        added = await b.added()
        assert (added.prompt_token_ids, added.sent_token_ids, added.sent_text_lengths) == (ids, sent, [3])


async def test_chat_takes_the_rest_of_the_context_and_one_bos() -> None:
    async with bench(TEMPLATE) as b:
        b.send(chat("Hello"))
        added = await b.added()
        assert unpack_tokens(added.prompt_token_ids) == [0, 1578]
        assert added.params.max_tokens == 254
        b.send(chat("Hello", max_tokens=5))
        assert (await b.added()).params.max_tokens == 5


async def test_a_long_text_goes_through_a_thread() -> None:
    async with bench() as b:
        prompt = "word " * (LONG_TEXT // 4)
        b.roster()
        object.__setattr__(b.actor, "roster", Roster(1, 1, []))
        b.send(text(prompt), text("Hello", "s"))
        first, second = await b.next(b.scheduler, 2)
        assert first.header.request_id == "s"
        assert unpack_tokens(second.prompt_token_ids) == b.model.encode(prompt)


async def test_bad_words_with_and_without_their_space() -> None:
    async with bench() as b:
        b.send(text("Hello", bad_words=["cat", " cat"], bad_words_token_ids=[[7]]))
        words = (await b.added()).params.bad_words_token_ids
        assert words == [[7], b.model.encode_plain("cat"), b.model.encode_plain(" cat")]


REFUSED = [
    (text(""), "prompt", "empty"),
    (text(None), "prompt", "exactly one"),
    (TokenizeRequest(header(), SamplingParams(), text="a", token_ids=b""), "prompt", "exactly one"),
    (TokenizeRequest(header(), SamplingParams(), token_ids=b"abc"), "token_ids", "multiple of 4"),
    (text("é" * 600), "prompt", "max_prompt_bytes=1000"),
    (chat("é" * 600), "chat", "max_prompt_bytes=1000"),
    (chat(), "chat", "at least one message"),
    (
        TokenizeRequest(header(), SamplingParams(), chat=[ChatMessage("the boss", "x")]),
        "chat.messages[0].role",
        "must be a word, got 'the boss'",
    ),
    (text("a", stop=["x"] * 65), "stop", "more than 64"),
    (text("a", bad_words=["x"] * 257), "bad_words", "more than 256"),
    (text("a", top_p=0.0), "top_p", "must be in"),
    (text("a", stop_token_ids=[32000]), "stop_token_ids", "out of vocabulary"),
]


async def test_refusals_name_the_field() -> None:
    async with bench(TEMPLATE, max_prompt_bytes=1000) as b:
        for request, field, words in REFUSED:
            rejection = await b.rejected(request)
            assert (rejection.request_id, rejection.code, rejection.field) == ("r", RejectCode.INVALID_ARGUMENT, field)
            assert words in rejection.message
        b.send(text("Hello"))
        await b.added()


async def test_a_hopelessly_long_prompt_is_refused_unread() -> None:
    async with bench() as b:
        rejection = await b.rejected(text("x" * 100_000))
        assert rejection.field == "prompt" and "max_input_length=200" in rejection.message


async def test_a_model_without_chat_template() -> None:
    async with bench() as b:
        assert "no chat template" in (await b.rejected(chat("Hello"))).message


async def test_a_stream_under_way_waits_for_a_child_where_a_new_request_is_refused() -> None:
    async with bench(TEMPLATE, template_timeout=0.2) as b:
        assert b.pool is not None
        b.send(chat("Hello"))
        await b.added()
        children = [await b.pool._idle.get() for _ in range(NUM_RENDERERS)]
        again = msgspec.structs.replace(chat("Hello", request_id="under way"), is_resumed=True)
        rejection = await b.rejected(again, chat("Hello", request_id="new"))
        assert (rejection.request_id, rejection.code) == ("new", RejectCode.UNAVAILABLE)
        for child in children:
            b.pool._idle.put_nowait(child)
        assert (await b.added()).header.request_id == "under way"


async def test_a_stream_under_way_is_sent_on_with_the_name_of_what_began_it() -> None:
    """The scheduler gives it to a worker that computes the same, and to no other."""
    async with bench() as b:
        b.send(msgspec.structs.replace(text("Hello"), is_resumed=True, fingerprint="fp_a"))
        assert (await b.added()).fingerprint == "fp_a"


async def test_a_passed_deadline() -> None:
    async with bench() as b:
        late = TokenizeRequest(header(deadline=steady_time() - 1), SamplingParams(), text="Hello")
        assert (await b.rejected(late)).code is RejectCode.DEADLINE_EXCEEDED


async def test_without_a_scheduler() -> None:
    async with bench(live=False) as b:
        assert (await b.rejected(text("Hello"))).code is RejectCode.UNAVAILABLE
        b.send(EncodeRequest("e", GATEWAY, text="Hello"))  # needs none
        assert await b.next(b.gateway) == [EncodeResult("e", pack_tokens([0, 1578]))]


async def test_a_defect_ends_one_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        with monkeypatch.context() as patch:
            patch.setattr(b.actor.tokenizer, "encode", lambda _: 1 // 0)
            assert (await b.rejected(text("Hello"))).code is RejectCode.INTERNAL
        b.send(text("Hello"))
        await b.added()


async def test_an_endless_template_ends_its_request_while_others_go_on() -> None:
    async with bench(TEMPLATE) as b:
        started = time.monotonic()
        b.send(chat("loop"), text("Hello", "s"), chat("Hello", request_id="t"))
        served = await b.next(b.scheduler, 2)
        assert {message.header.request_id for message in served} == {"s", "t"}
        (rejection,) = await b.next(b.gateway)
        assert (rejection.request_id, rejection.code, rejection.field) == ("r", RejectCode.INVALID_ARGUMENT, "chat")
        assert time.monotonic() - started < 30


async def test_abort_follows_its_request_and_cancels_a_rendering() -> None:
    async with bench(TEMPLATE) as b:
        b.send(text("Hello"), AbortRequest("r"), chat("Hello", request_id="s"), AbortRequest("s", "deadline"))
        messages = await b.next(b.scheduler, 3)
        assert isinstance(messages[0], AddRequest)
        assert messages[1:] == [AbortRequest("r"), AbortRequest("s", "deadline")]
        async with asyncio.timeout(10):
            while b.actor.pending:  # the cancelled rendering has yet to hear of it
                await asyncio.sleep(0.01)
        b.send(chat("Hello", request_id="s"))
        assert (await b.added()).header.request_id == "s"


async def test_a_request_sent_anew_is_served_once() -> None:
    async with bench(TEMPLATE) as b:
        b.send(chat("Hello"), chat("Hello there"))
        assert len(unpack_tokens((await b.added()).prompt_token_ids)) == 3


async def test_encode_and_decode() -> None:
    async with bench(TEMPLATE) as b:
        b.send(EncodeRequest("a", GATEWAY, text="Hello", add_special_tokens=False))
        assert await b.next(b.gateway) == [EncodeResult("a", pack_tokens([1578]))]
        b.send(EncodeRequest("b", GATEWAY, chat=[ChatMessage("user", "Hello")]))
        assert await b.next(b.gateway) == [EncodeResult("b", pack_tokens([0, 1578]))]
        b.send(DecodeRequest("c", GATEWAY, pack_tokens([0, 1578])))
        b.send(DecodeRequest("d", GATEWAY, pack_tokens([0, 1578]), skip_special_tokens=False))
        assert await b.next(b.gateway, 2) == [DecodeResult("c", "Hello"), DecodeResult("d", "<|endoftext|>Hello")]


@pytest.mark.parametrize("packed", [pack_tokens([32000]), pack_tokens([-1]), b"abc"])
async def test_decoding_what_is_no_token(packed: bytes) -> None:
    async with bench() as b:
        rejection = await b.rejected(DecodeRequest("d", GATEWAY, packed))
        assert (rejection.code, rejection.field) == (RejectCode.INVALID_ARGUMENT, "token_ids")


async def test_encoding_nothing_or_two_things() -> None:
    async with bench(TEMPLATE) as b:
        assert (await b.rejected(EncodeRequest("e", GATEWAY))).field == "prompt"
        both = EncodeRequest("e", GATEWAY, text="a", chat=[ChatMessage("user", "a")])
        assert (await b.rejected(both)).field == "prompt"


async def test_draining_finishes_what_is_under_way() -> None:
    async with bench(TEMPLATE, template_timeout=1.0) as b:
        b.send(chat("loop"), chat("Hello", request_id="s"))
        b.actor.request_drain()
        assert (await b.added()).header.request_id == "s"
        (rejection,) = await b.next(b.gateway)
        assert rejection.request_id == "r"


async def test_draining_does_not_outlast_its_deadline() -> None:
    async with bench(TEMPLATE, template_timeout=30.0) as b:
        b.send(chat("loop"))
        await asyncio.sleep(0.1)
        b.actor.request_drain(time.time() + 0.2)
        async with asyncio.timeout(20):
            while b.actor.inbox.address in b.network.inboxes:
                await asyncio.sleep(0.02)


async def test_a_request_that_is_sent_again_meanwhile_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that hears nothing supposes that it was lost; what it knows of output is used."""
    async with bench(TEMPLATE) as b:
        assert b.pool is not None
        rendered, render = [], b.pool.render

        async def noted(*arguments: Any) -> str:
            rendered.append(arguments)
            return await render(*arguments)

        monkeypatch.setattr(b.pool, "render", noted)
        b.send(chat("Hello"), msgspec.structs.replace(chat("Hello"), is_resumed=True))
        assert not (await b.added()).is_resumed, "no scheduler has had it"
        with_output = msgspec.structs.replace(
            chat("Hello", request_id="s"), is_resumed=True, sent_token_ids=[pack_tokens([7])], sent_finished=[False]
        )
        b.send(chat("Hello", request_id="s"), with_output)
        added = await b.added()
        assert added.is_resumed and added.sent_token_ids == [pack_tokens([7])]
        b.send(chat("Hello", request_id="t"), text("Hello there", request_id="t"))
        assert len(unpack_tokens((await b.added()).prompt_token_ids)) == 3, "another prompt is another request"
        assert len(rendered) == 3


async def test_a_prompt_with_a_large_integer_costs_no_child() -> None:
    async with bench("{{ messages[0].tool_calls[0].function.arguments | tojson }}") as b:
        large = '{"wei": 2' + "0" * 22 + "}"
        longest = '{"wei": 2' + "0" * 5000 + "}"  # of more digits than Python reads
        for request_id, arguments in (("a", large), ("b", longest)):
            call = ToolCall("c", "pay", arguments)
            message = ChatMessage("assistant", "", tool_calls=[call])
            b.send(TokenizeRequest(header(request_id), SamplingParams(), chat=[message]))
            if request_id == "a":
                prompt = unpack_tokens((await b.added()).prompt_token_ids)
                assert b.model.decode(prompt, skip_special_tokens=False) == large
            else:
                (rejection,) = await b.next(b.gateway)
                assert rejection.code is RejectCode.INVALID_ARGUMENT
        assert b.pool is not None and not b.pool.num_killed
