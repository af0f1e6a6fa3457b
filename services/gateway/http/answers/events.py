"""Answers that come in time: server-sent events, and whole bodies; both end when their client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.http.errors.failures import abort, error_body
from shared.errors import RequestError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
LAST_SECONDS = 5.0  # in which a client reads how its stream failed
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx would gather the events
}


class ClientGoneError(Exception):
    """The client has closed the connection."""


class UnreadError(Exception):
    """The client does not read how the answer ends."""


class Events:
    """The writing end of one stream of events.  The status goes out with the first of them, and not before: until then
    a refusal is still a status."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self.begun = False
        self._send = send
        self._headers = MutableHeaders(headers=dict(headers))
        self._turn = asyncio.Lock()  # several sequences write, and the first begins

    async def write(self, data: bytes) -> None:
        """Events with their `data:` and their blank lines.  Waits for a reader that is behind."""
        if not data:
            return
        async with self._turn:
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers.raw})
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def failure_event(error: RequestError, scope: Scope) -> bytes:
    """The last events of a stream that has begun and cannot go on."""
    return event(error_body(error, scope)) + DONE


class EventResponse(Response):
    """Runs `work`, which writes events.  An error after the first one is an event too, which `fail` makes; a client
    that does not read it in time loses the connection, which would wait for it for ever."""

    def __init__(
        self,
        work: Callable[[Events], Awaitable[None]],
        headers: Mapping[str, str],
        fail: Callable[[RequestError, Scope], bytes] = failure_event,
    ) -> None:
        super().__init__()
        self._work = work
        self._fail = fail
        self._event_headers = {**EVENT_HEADERS, **headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._run(Events(send, self._event_headers), scope))
        except ClientGoneError:
            return
        except UnreadError:
            abort(scope)
            await _until_gone(receive)

    async def _run(self, events: Events, scope: Scope) -> None:
        try:
            await self._work(events)
        except RequestError as error:
            if not events.begun:
                raise
            try:
                async with asyncio.timeout(LAST_SECONDS):
                    await events.write(self._fail(error, scope))
                    await events.close()
            except TimeoutError:
                raise UnreadError from error
        else:
            await events.close()


class WholeResponse(Response):
    """Runs `work`, whose outcome is the JSON body, or a response of another type."""

    media_type = "application/json"

    def __init__(self, work: Callable[[], Coroutine[Any, Any, bytes | Response]], headers: Mapping[str, str]) -> None:
        super().__init__()
        self._work = work
        self._more_headers = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await unless_gone(receive, self._work())
        except ClientGoneError:
            return
        if isinstance(body, bytes):
            body = Response(body, 200, self._more_headers, self.media_type)
        await body(scope, receive, send)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`; ClientGoneError, and `work` cancelled, where the client goes away before."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait((working, watching))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: bytes) -> bytes:
    """One event without a name."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
