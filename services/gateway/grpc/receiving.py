"""How gRPC's messages come in: within the gateway's bounds in number and in time, and as messages that can be read.

Handlers are registered as if their requests were streams: so it is here that a message is asked for, after the call's
headers have been looked at.  gRPC's core receives little of a message before the handler asks for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.gateway.access.auth import Access
from services.gateway.access.intake import PATIENCE, SMALL, BodyIntake, BodyTimeoutError, refusal_wait
from services.gateway.grpc.interceptors import OPEN, Continuation
from services.gateway.grpc.status import abort
from shared.errors import RejectCode, RequestError
from shared.fairness.fair_slots import FairSlots

CONTENDED_SECONDS = 1.0  # that a message may take while others wait for its place
MOST_SLOW = 16  # calls of a sender in debt that wait to be read; further ones are refused unread
MAX_DEBTORS = 64  # senders in debt whose calls are read at the same time
PATIENT = 3  # times `body_timeout` that one may take otherwise: gRPC does not say how much of it has come
REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)

Method = Callable[[Any, Any], Awaitable[Any]]


class ReceivingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Reads every call's one message; a call whose message cannot be read ends with INVALID_ARGUMENT."""

    def __init__(self, intake: BodyIntake, access: Access, max_request_bytes: int) -> None:
        self._intake = intake
        self._access = access
        num_places = max(2, intake.limits.total // max_request_bytes)
        self._slow = FairSlots(MAX_DEBTORS, per_owner=1)
        self._slots = FairSlots(
            num_places, per_owner=num_places // 2
        )  # a sender that sends nothing leaves room to others

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        handler: Any = await continuation(details)
        if details.method.startswith(OPEN) or handler is None or handler.request_streaming:
            return handler
        if handler.response_streaming:
            call = self._call(handler.request_deserializer, handler.unary_stream)
            return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)
        call = self._call(handler.request_deserializer, handler.unary_unary)
        return grpc.stream_unary_rpc_method_handler(call, None, handler.response_serializer)

    def _call(self, parse: Callable[[bytes], Any], method: Method) -> Any:
        async def call(_: Any, context: Any) -> Any:
            sender = self._access.sender(context.invocation_metadata() or (), host_of(context.peer()))
            try:
                data = await self._affordable(context, sender)
            except RequestError as error:
                await abort(context, error)
            try:
                request = parse(data)
            except (DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._intake.refused(sender, len(data))
                await abort(context, RequestError(f"the message cannot be read: {str(error)[:200]}", field="message"))
            size = len(data)
            del data  # a stream may last for hours
            try:
                return await method(request, context)
            except grpc.aio.AbortError:
                if context.code() in REFUSALS:
                    self._intake.refused(sender, size)
                raise

        return call

    async def _affordable(self, context: Any, sender: str) -> bytes:
        """The call's message.

        gRPC says how large a message is only once it has been read.  So the calls of a sender in debt are read slowly
        and one at a time, and the large ones among them are refused.  Small ones are served: a client that shares an
        address with that sender is only slowed down.
        """
        wait = self._intake.wait(sender)
        if wait <= PATIENCE:
            await asyncio.sleep(wait)
            return await self._message(context, sender)
        if self._slow.num_waiting_of(sender) >= MOST_SLOW:
            await asyncio.sleep(refusal_wait())
            raise self._intake.in_debt(sender)
        async with self._slow.turn(sender):
            await asyncio.sleep(refusal_wait())
            data = await self._message(context, sender)
        if len(data) > SMALL and self._intake.wait(sender) > PATIENCE:
            self._intake.refused(sender, len(data))
            raise self._intake.in_debt(sender)
        return data

    async def _message(self, context: Any, sender: str) -> bytes:
        """The call's message; it may take long only while no other waits for the place."""
        async with self._slots.turn(sender):
            until = time.monotonic() + PATIENT * self._intake.limits.seconds
            reading = asyncio.ensure_future(context.read())
            try:
                while not (await asyncio.wait((reading,), timeout=CONTENDED_SECONDS))[0]:
                    if self._slots.num_waiting or time.monotonic() >= until:
                        raise BodyTimeoutError(
                            "the call's message did not come in time", code=RejectCode.DEADLINE_EXCEEDED
                        )
                data = reading.result()
            finally:
                reading.cancel()
        if not isinstance(data, bytes):
            raise RequestError("the call has no message", field="message")
        return data


def host_of(peer: str) -> str:
    """The address in what gRPC calls a peer: `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else rest
    return host.replace("%5B", "").replace("%5D", "").strip("[]")
