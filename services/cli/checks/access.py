"""Keys and certificates, as the gateway will read them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from services.cli.checks.finding import Finding
from services.gateway.access.auth import make_access
from shared.config import AccessSettings, Settings
from shared.errors import ConfigError
from shared.exposure import KEYS_ADVICE


def check_access(settings: Settings) -> Iterator[Finding]:
    """Who may ask, and over what."""
    try:
        access = make_access(settings.access)
    except ConfigError as error:
        yield Finding("wrong", "keys", str(error))
    else:
        if settings.access.is_open_to_others(settings.gateway.host):
            yield Finding("note", "keys", f"none, at host {settings.gateway.host}: {KEYS_ADVICE}")
        else:
            yield Finding("ok", "keys", "none: any program of this machine may ask" if access.is_open else "needed")
    if settings.access.tls_cert_file and (wrong := _wrong_with_tls(settings.access)):
        yield Finding("wrong", "tls", wrong)


def _wrong_with_tls(settings: AccessSettings) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file, password="")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        return f"tls_cert_file {settings.tls_cert_file} and tls_key_file {settings.tls_key_file}: {_reason(error)}"
    try:
        if settings.tls_client_ca_file:
            context.load_verify_locations(settings.tls_client_ca_file)
    except OSError as error:
        return f"tls_client_ca_file {settings.tls_client_ca_file}: {_reason(error)}"
    return ""


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
