"""Where the gateway of these settings is reached from this machine."""

from __future__ import annotations

import socket

from shared.config import GatewaySettings, Settings

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}


def reached_host(settings: GatewaySettings) -> str:
    host = WILDCARDS.get(settings.host, settings.host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def grpc_address(settings: GatewaySettings) -> str:
    return f"{reached_host(settings)}:{settings.port}"


def http_address(settings: Settings) -> str:
    """Where browsers and HTTP clients find the gateway; empty where they do not."""
    if settings.gateway.http_port < 0:
        return ""
    return f"http{'s' if settings.access.tls_cert_file else ''}://{reached_host(settings.gateway)}:{settings.gateway.http_port}"


def with_port(settings: Settings) -> Settings:
    """A port of 0 becomes a free one, known before the gateway is."""
    free = {name: free_port() for name in ("port", "http_port") if getattr(settings.gateway, name) == 0}
    return settings.replace(**free)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
