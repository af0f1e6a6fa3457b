"""Where the gateway of these settings is reached from this machine, and what `pageant serve` prints once ready."""

from __future__ import annotations

import socket

from shared.config import GatewaySettings, Settings

KEY = "YOUR_KEY"
DEFAULT_PORT = Settings().gateway.port
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}


def reached_host(settings: GatewaySettings) -> str:
    host = WILDCARDS.get(settings.host, settings.host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def grpc_address(settings: GatewaySettings) -> str:
    return f"{reached_host(settings)}:{settings.port}"


def http_address(settings: Settings) -> str:
    """Of the HTTP interface; empty where there is none."""
    if settings.gateway.http_port < 0:
        return ""
    scheme = "https" if settings.access.tls_cert_file else "http"
    return f"{scheme}://{reached_host(settings.gateway)}:{settings.gateway.http_port}"


def with_port(settings: Settings) -> Settings:
    """The settings with free ports in place of 0, so that they are known before the gateway starts."""
    free = {name: free_port() for name in ("port", "http_port") if getattr(settings.gateway, name) == 0}
    return settings.replace(**free)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def ready_block(settings: Settings) -> str:
    """One block for people, with lines that work as they are, once a key is filled in where one is needed; the first
    begins with `ready:`."""
    lines, address, url = [], grpc_address(settings.gateway), http_address(settings)
    needs_key = bool(settings.access.api_keys or settings.access.api_keys_file)
    if url:
        trust = f" --cacert {settings.access.tls_cert_file}" if settings.access.tls_cert_file else ""
        key = f" -H 'Authorization: Bearer {KEY}'" if needs_key else ""
        asked = """-H 'Content-Type: application/json' -d '{"prompt": "Once upon a time", "max_tokens": 60}'"""
        lines = [f"page   {url}", f"curl   curl{trust} {url}/v1/completions{key} {asked}"]
    options = f" --address {address}" if address != f"127.0.0.1:{DEFAULT_PORT}" else ""
    options += f" --api-key {KEY}" if needs_key else ""
    options += f" --tls-ca {settings.access.tls_cert_file}" if settings.access.tls_cert_file else ""
    lines += [f"chat   pageant chat{options}", "stop   Ctrl-C"]
    return "\n  ".join([f"ready: {settings.engine.model_name} at {address}", *lines])
