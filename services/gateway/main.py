"""Assembly of the gateway."""

from __future__ import annotations

from services.gateway.actor import GatewayActor
from shared.actor import run_actor
from shared.config import Settings
from shared.transport import Transport


def make(transport: Transport, settings: Settings) -> GatewayActor:
    return GatewayActor(transport, settings)


def main() -> int:
    return run_actor(make)
