"""What `pageant serve` says when everything is there: where the page is, and two ways to ask for a first answer."""

from __future__ import annotations

from collections.abc import Iterator

from services.cli.addresses import grpc_address, http_address
from shared.config import AccessSettings, Settings

KEY = "YOUR_KEY"
DEFAULT_PORT = Settings().gateway.port


def ready_block(settings: Settings) -> str:
    """One block for people; its first line begins with `ready:`."""
    return "\n".join([f"ready: {settings.engine.model_name} at {grpc_address(settings.gateway)}", *_ways(settings)])


def _ways(settings: Settings) -> Iterator[str]:
    if url := http_address(settings):
        yield f"  page   {url}"
        yield f"  curl   {curl_line(settings, url)}"
    yield f"  chat   {chat_line(settings)}"
    yield "  stop   Ctrl-C"


def curl_line(settings: Settings, url: str) -> str:
    """A line that works as it is, once a key is filled in where one is needed."""
    key = f" -H 'Authorization: Bearer {KEY}'" if needs_key(settings.access) else ""
    trust = f" --cacert {settings.access.tls_cert_file}" if settings.access.tls_cert_file else ""
    return (
        f"curl{trust} {url}/v1/completions{key} -H 'Content-Type: application/json' "
        """-d '{"prompt": "Once upon a time", "max_tokens": 60}'"""
    )


def chat_line(settings: Settings) -> str:
    address = grpc_address(settings.gateway)
    options = f" --address {address}" if address != f"127.0.0.1:{DEFAULT_PORT}" else ""
    options += f" --api-key {KEY}" if needs_key(settings.access) else ""
    certificate = settings.access.tls_cert_file
    return f"pageant chat{options}{f' --tls-ca {certificate}' if certificate else ''}"


def needs_key(settings: AccessSettings) -> bool:
    return bool(settings.api_keys or settings.api_keys_file)
