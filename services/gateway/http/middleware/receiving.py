"""Receives the bodies of requests within the gateway's bounds in bytes and time; refused ones are thrown away."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access.auth import Access
from services.gateway.access.intake import BODY, PATIENCE, SMALL, Body, BodyIntake, BodyTimeoutError, refusal_wait
from services.gateway.http.errors.failures import CLIENT_CLOSED_REQUEST, refusal
from shared.errors import RequestError

FAREWELL_SECONDS = 0.5  # between the answer and the end of a connection whose body is not read
BUSY = frozenset({408, 429, 503})  # answers that say that there is too much already ...
MOST_WHEN_BUSY = 2 << 20  # ... so that no more of the body than this is thrown away after them
CLOSE = (b"connection", b"close")


class ReceivingMiddleware:
    """Counts the bytes received for every endpoint and from every sender."""

    def __init__(self, app: ASGIApp, intake: BodyIntake, access: Access) -> None:
        self._app = app
        self._intake = intake
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(request := Request(scope)):
            await self._app(scope, receive, send)
            return
        host = request.client.host if request.client is not None else ""
        sender = self._access.sender(request.headers.items(), host)
        body = scope[BODY] = self._intake.body(sender)
        exchange = Exchange(body, receive, send, self._intake)
        try:
            if is_large(request) and (wait := self._intake.wait(sender)):
                await asyncio.sleep(wait if wait <= PATIENCE else refusal_wait())
                if wait > PATIENCE:
                    exchange.is_drained = False
                    await refusal(self._intake.in_debt(sender), scope)(scope, exchange.receive, exchange.send)
                    return
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            body.close()
            if exchange.is_refused:
                self._intake.refused(sender, body.num_bytes)


class Exchange:
    """One request's body on its way in, and what its answer says.

    Many clients look for the answer only when they have sent everything, and find none where the connection is cut in
    the middle.  So what is not read for an answer is thrown away after it, at its sender's charge, unless the sender is
    in debt; and then the connection ends.
    """

    def __init__(self, body: Body, receive: Receive, send: Send, intake: BodyIntake) -> None:
        self.is_refused = False
        self.is_drained = True
        self._body = body
        self._receive = receive
        self._send = send
        self._seconds = intake.limits.seconds
        self._most = intake.limits.sender
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()  # that the client goes away
        try:
            async with asyncio.timeout(self._seconds):
                message = await self._receive()
        except TimeoutError:
            raise self._body.late() from None
        if message["type"] == "http.request":
            self._is_whole = not message.get("more_body", False)
            if not self._is_whole:
                await self._count(len(message.get("body", b"")))
            else:  # it is decoded at once, and counts as a request from there on
                self._body.num_bytes += len(message.get("body", b""))
                self._body.close()
        return message

    async def _count(self, num_bytes: int) -> None:
        try:
            rest = self._body.grow(num_bytes)
        except BodyTimeoutError:
            raise
        except RequestError:  # there is too much already, of which each answer at once would be followed by more
            await asyncio.sleep(refusal_wait())
            raise
        if rest:
            await asyncio.sleep(rest)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            status: int = message["status"]
            if status in BUSY:
                self._most = min(self._most, self._body.num_bytes + MOST_WHEN_BUSY)
            self.is_refused = 400 <= status < 500 and status != CLIENT_CLOSED_REQUEST
            if not self._is_whole:
                headers: list[Any] = [header for header in message.get("headers", ()) if header[0] != CLOSE[0]]
                message = {**message, "headers": [*headers, CLOSE]}
        elif not self._is_whole and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await (self._drain() if self.is_drained else asyncio.sleep(FAREWELL_SECONDS))
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            while self._body.num_bytes < self._most:
                async with asyncio.timeout(FAREWELL_SECONDS):
                    message = await self._receive()
                self._body.num_bytes += len(message.get("body", b""))
                await asyncio.sleep(self._body.rest(len(message.get("body", b""))))
                if not message.get("more_body", False):
                    return


def has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"


def is_large(request: Request) -> bool:
    """Whether a body may be larger than those that are always read; one without a length may be."""
    declared = request.headers.get("content-length", "")
    return not (declared.isdecimal() and int(declared) <= SMALL)
