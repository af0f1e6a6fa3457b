"""Shows every gRPC call's headers to the gate before its message is read: no method can be forgotten."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from services.gateway import status
from services.gateway.auth import Access
from shared.errors import RequestError

# Whether it serves, and what its messages are, a gateway tells everybody.
OPEN = tuple(
    f"/{name}/" for name in (health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
)


class KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc-stubs know it as Any
    """Ends calls without a key that opens with UNAUTHENTICATED."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if not details.method.startswith(OPEN):
            try:
                self._access.caller(details.invocation_metadata or ())
            except RequestError as error:
                return refusing(error)
        return await continuation(details)


def refusing(error: RequestError) -> Any:
    """A handler that ends whatever call it gets with this error, unread."""

    async def refuse(_: bytes, context: Any) -> None:
        await context.abort(status.STATUS[error.code], status.details(error), status.trailing_metadata(error))

    return grpc.unary_unary_rpc_method_handler(refuse)
