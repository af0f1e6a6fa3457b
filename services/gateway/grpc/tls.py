"""The gateway's own certificate, and those that it wants to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from shared.config import AccessSettings
from shared.errors import ConfigError


def server_credentials(settings: AccessSettings) -> Any:
    """What the gRPC server shows and asks for; None where the settings name no certificate.

    Raises ConfigError where a file cannot be read or is no PEM.
    """
    if not settings.tls_cert_file:
        return None
    pair = (read_pem(settings.tls_key_file, "tls_key_file"), read_pem(settings.tls_cert_file, "tls_cert_file"))
    authority = read_pem(settings.tls_client_ca_file, "tls_client_ca_file") if settings.tls_client_ca_file else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def read_pem(path: str, setting: str) -> bytes:
    """A PEM file's bytes; raises ConfigError naming the setting."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{setting} {path} is not a PEM file")
    return content
