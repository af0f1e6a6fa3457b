"""What every gRPC call passes before its message is read (`receiving.py`): it must show a valid key.

It is done here, for all methods, so that none can be forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from services.gateway.access.auth import Access
from services.gateway.grpc.status import abort
from shared.errors import RequestError

# Health and reflection need no key.
OPEN = tuple(
    f"/{name}/" for name in (health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
)

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Ends calls without a valid key with UNAUTHENTICATED, before their message is read."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        if not details.method.startswith(OPEN):
            try:
                self._access.caller(details.invocation_metadata or ())
            except RequestError as error:
                return refusing(error)
        return await continuation(details)


TURNS_OF_A_PAUSE = 10


class Arrivals(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Counts the calls that arrive."""

    def __init__(self) -> None:
        self._count = 0

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        self._count += 1
        return await continuation(details)

    async def until_none(self, pause: float, at_most: float) -> None:
        """Return once none has come for `pause` seconds, and after `at_most` seconds in any case.

        A pause has many turns of the loop, so that one in which the process had no processor is none.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                before, turns = self._count, 0
                while turns < TURNS_OF_A_PAUSE:
                    await asyncio.sleep(pause / TURNS_OF_A_PAUSE)
                    turns = turns + 1 if before == self._count else 0
                    before = self._count


def refusing(error: RequestError) -> Any:
    """A handler that ends every call with this error.  Of a stream of requests nothing is read unasked."""

    async def refuse(_: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_unary_rpc_method_handler(refuse)
