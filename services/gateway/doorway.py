"""What every gRPC call passes before its method: it must show a key that opens, and be a message that can be read.

Both are done here, for all methods, so that none can be forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from services.gateway import status
from services.gateway.auth import Access
from shared.errors import RequestError

# Whether it serves, and what its messages are, a gateway tells everybody.
OPEN = tuple(
    f"/{name}/" for name in (health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
)

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Ends calls without a key that opens with UNAUTHENTICATED, before their message is read."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        if not details.method.startswith(OPEN):
            try:
                self._access.caller(details.invocation_metadata or ())
            except RequestError as error:
                return refusing(error)
        return await continuation(details)


class Arrivals(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Knows whether calls come."""

    def __init__(self) -> None:
        self._count = 0

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        self._count += 1
        return await continuation(details)

    async def until_none(self, pause: float, at_most: float) -> None:
        """Return once none has come for `pause` seconds, and after `at_most` seconds in any case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                before = -1
                while before != self._count:
                    before = self._count
                    await asyncio.sleep(pause)


class MessageCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends calls whose message cannot be read with INVALID_ARGUMENT, where gRPC itself would call it our own fault."""

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        handler: Any = await continuation(details)
        if details.method.startswith(OPEN) or handler is None or handler.request_streaming:
            return handler
        if handler.response_streaming:
            return handler._replace(
                request_deserializer=readable(handler.request_deserializer), unary_stream=checked(handler.unary_stream)
            )
        return handler._replace(
            request_deserializer=readable(handler.request_deserializer), unary_unary=checked(handler.unary_unary)
        )


class Unreadable:
    """Stands for a message that could not be parsed."""

    def __init__(self, reason: str) -> None:
        self.error = RequestError(f"the message cannot be read: {reason}", field="message")


def readable(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except (DecodeError, UnicodeDecodeError, RecursionError) as error:
            return Unreadable(str(error)[:200])

    return parsed


def checked(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """The method, which is never called with what could not be read."""

    async def call(request: Any, context: Any) -> Any:
        if isinstance(request, Unreadable):
            await end(context, request.error)
        return await method(request, context)

    return call


def refusing(error: RequestError) -> Any:
    """A handler that ends whatever call it gets with this error, unread."""

    async def refuse(_: bytes, context: Any) -> None:
        await end(context, error)

    return grpc.unary_unary_rpc_method_handler(refuse)


async def end(context: Any, error: RequestError) -> None:
    await context.abort(status.STATUS[error.code], status.details(error), status.trailing_metadata(error))
