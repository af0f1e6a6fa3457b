"""A gateway process that takes the requests of one tenant for those of a batch: they are computed in the background.

python -m scripts.bench.common.quiet_gateway
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from services.gateway.actor import GatewayActor
from services.gateway.generation.service import GenerationService
from services.gateway.streams.stream import Position, Stream
from shared.actor import run_actor
from shared.config import Settings
from shared.messages import TokenizeRequest
from shared.transport import Transport

BATCH_TENANT = "batch"


def make(transport: Transport, settings: Settings) -> GatewayActor:
    """The real gateway, but for the header of these requests."""
    gateway = GatewayActor(transport, settings)
    open_stream = GenerationService.open

    def opened(request: TokenizeRequest, has: Sequence[Position] | None = None) -> Stream:
        header = msgspec.structs.replace(request.header, is_background=request.header.tenant == BATCH_TENANT)
        return open_stream(gateway.generation, msgspec.structs.replace(request, header=header), has)

    setattr(gateway.generation, "open", opened)  # noqa: B010  # a method of this one instance
    return gateway


if __name__ == "__main__":
    sys.exit(run_actor(make))
