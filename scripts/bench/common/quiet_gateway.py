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
from shared.messages import TokenizeRequest

BATCH_TENANT = "batch"


def main() -> int:
    """The real gateway, but for the header of these requests."""
    open_stream = GenerationService.open

    def opened(self: GenerationService, request: TokenizeRequest, has: Sequence[Position] | None = None) -> Stream:
        header = msgspec.structs.replace(request.header, is_background=request.header.tenant == BATCH_TENANT)
        return open_stream(self, msgspec.structs.replace(request, header=header), has)

    GenerationService.open = opened  # type: ignore[method-assign]
    return run_actor(GatewayActor)


if __name__ == "__main__":
    sys.exit(main())
