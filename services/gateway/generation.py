"""One generation from its admission to its last word: the way that every front takes, whatever its clients speak."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from services.gateway.report import StreamReport
from services.gateway.streams import Position, Stream
from shared.clock import steady_time
from shared.errors import RejectCode, RequestError
from shared.grammar import check_grammar
from shared.messages import TokenizeRequest
from shared.messages.codec import MAX_MESSAGE_BYTES
from shared.packing import pack_tokens
from shared.sampling import too_long

if TYPE_CHECKING:
    from services.gateway.actor import GatewayActor

MAX_LABEL_CHARS = 256  # it is in every log line of its request
MAX_TOKENS_PER_MESSAGE = MAX_MESSAGE_BYTES // 8
QUESTION_TIMEOUT = 30.0  # seconds, for a client that set no deadline

T = TypeVar("T")


def check_model(name: str, served: str) -> None:
    """Raise RequestError unless `name` is empty or what is served."""
    if name and name != served:
        raise RequestError(f"model {name!r} is not served; served: {served}", field="model", code=RejectCode.NOT_FOUND)


def check_label(label: str) -> None:
    if len(label) > MAX_LABEL_CHARS:
        raise RequestError(f"label has {len(label)} characters, more than {MAX_LABEL_CHARS}", field="label")


def check_n(n: int, max_n: int, *, field: str = "n") -> None:
    """Raise RequestError on more sequences than may be; before anything is made for each of them."""
    if n > max_n:
        raise RequestError(f"{field} must be at most {max_n}, got {n}", field=field)


def packed_prompt(ids: Sequence[int], max_tokens: int) -> bytes:
    """Packed ids; bounded here already, because four bytes an id may outgrow a message that was within bounds."""
    if len(ids) > max_tokens:
        raise too_long("prompt", f"has {len(ids)} tokens, more than max_input_length={max_tokens}")
    return pack_tokens(ids)


async def generate(
    actor: GatewayActor,
    request: TokenizeRequest,
    report: StreamReport,
    deliver: Callable[[Stream], Awaitable[None]],
    *,
    has: Sequence[Position] | None = None,
) -> None:
    """Open a stream and let `deliver` take its output to the end, within the request's deadline.

    `has`: what a client that comes back has of it.  Raises RequestError where it is refused, fails or expires.  Being
    cancelled aborts it.
    """
    await within(request.header.deadline, _generate(actor, request, report, deliver, has))


async def _generate(
    actor: GatewayActor,
    request: TokenizeRequest,
    report: StreamReport,
    deliver: Callable[[Stream], Awaitable[None]],
    has: Sequence[Position] | None,
) -> None:
    try:
        check_n(request.params.n, actor.settings.max_n)
        if request.params.grammar is not None:
            check_grammar(request.params.grammar)  # before a megabyte of it is sent on
        await actor.readiness.until_available()
        stream = actor.reception.open(request, has)
    finally:
        report.received(request)
    report.opened(stream)
    try:
        await stream.deliver(deliver(stream))
    finally:
        actor.reception.close(stream)
    if stream.error is not None:
        raise stream.error
    report.finished(stream)


async def all_or_none(works: Sequence[Awaitable[None]]) -> None:
    """Await all; the first RequestError cancels the others and is the one that is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def within(deadline: float | None, work: Awaitable[T]) -> T:
    """Await `work` until `deadline` (of the steady clock); raises RequestError past it."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(deadline - steady_time()):
            return await work
    except TimeoutError:
        raise RequestError("the call's deadline passed", code=RejectCode.DEADLINE_EXCEEDED) from None
