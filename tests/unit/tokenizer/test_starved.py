"""A tokenizer whose compilers get no processor: requests that were let in wait, new ones and those under way."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.tokenizer.confined.compilers import CompilerPool
from services.tokenizer.confined.frames import Compilation, CompileJob
from shared.clocks.clock import steady_time
from shared.errors import RejectCode
from shared.messages import AddRequest, RequestHeader, RequestRejected, TokenizeRequest
from shared.packing import pack_tokens
from shared.requests.grammar import Grammar, GrammarKind
from shared.requests.sampling import SamplingParams
from tests.unit.tokenizer.bench import GATEWAY, Bench, bench

LONGER = 1.0  # seconds: twice as long as requests were let wait once


def held(text: str, request_id: str, *, deadline: float | None = None, is_resumed: bool = False) -> TokenizeRequest:
    params = SamplingParams(max_tokens=4, grammar=Grammar(GrammarKind.REGEX, text, "guided_regex"))
    header = RequestHeader(request_id, GATEWAY, deadline=deadline)
    request = TokenizeRequest(header, params, token_ids=pack_tokens([1, 2]))
    return msgspec.structs.replace(request, is_resumed=True, sent_token_ids=[b""]) if is_resumed else request


def starve(b: Bench, monkeypatch: pytest.MonkeyPatch) -> CompilerPool:
    """Its compilers are up, and none of them ever becomes free by itself."""
    pool = b.actor.compilers

    async def work(child: object, job: CompileJob, seconds: float, longest: float) -> Compilation:
        return Compilation("start: /a/")

    monkeypatch.setattr(pool, "started", lambda: asyncio.sleep(0))
    monkeypatch.setattr(pool, "work", work)
    return pool


async def test_new_ones_and_those_under_way_wait_until_there_is_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as b:
        pool = starve(b, monkeypatch)
        b.send(held("a+", "new"), held("b+", "resumed", is_resumed=True))
        waiting = asyncio.create_task(b.next(b.scheduler, 2))
        await asyncio.wait({waiting}, timeout=LONGER)
        assert not waiting.done() and not b.gateway._mail
        for child in (object(), object()):
            pool._idle.put_nowait(child)  # type: ignore[arg-type]
        served = await waiting
        assert {message.header.request_id for message in served} == {"new", "resumed"}
        assert all(isinstance(message, AddRequest) for message in served)
        while not pool._idle.empty():
            pool._idle.get_nowait()  # no process is behind them, that could be ended


async def test_a_request_waits_no_longer_than_its_deadline_or_the_resume_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench(resume_timeout=0.6) as b:
        starve(b, monkeypatch)
        b.send(held("a+", "late", deadline=steady_time() + 0.2), held("b+", "resumed", is_resumed=True))
        rejections: dict[str, RequestRejected] = {one.request_id: one for one in await b.next(b.gateway, 2)}
        assert rejections["late"].code is RejectCode.DEADLINE_EXCEEDED
        assert rejections["resumed"].code is RejectCode.RESOURCE_EXHAUSTED
        assert rejections["resumed"].field == "guided_regex"
