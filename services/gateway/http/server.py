"""The HTTP server: uvicorn within the gateway's own event loop, without its signals, its logs and its files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.http.app import make_app
from services.gateway.http.gate import Gate
from shared.config import Settings
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.gateway.actor import GatewayActor

log = structlog.get_logger()

MAX_HEADER_BYTES = 64 << 10  # beyond what one read brings, which may be as much again
GRACE = 1  # seconds that open connections have at the end
KEEP_ALIVE = 75  # seconds; longer than the pools of most clients keep an idle connection


class HttpServer:
    """Listens on `http_port`; everything that it does for a client goes through the gate."""

    def __init__(self, actor: GatewayActor, settings: Settings) -> None:
        self._settings = settings
        self._app = make_app(Gate(actor, settings))
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen; raises ConfigError where the port is taken."""
        listener = listen(self._settings.host, self._settings.http_port, share=self._settings.share_port)
        self.port = listener.getsockname()[1]
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong in an endpoint is logged by `defect`
        settings = self._settings
        config = uvicorn.Config(
            self._app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
            ssl_certfile=settings.tls_cert_file or None,
            ssl_keyfile=settings.tls_key_file or None,
            ssl_ca_certs=settings.tls_client_ca_file or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_client_ca_file else ssl.CERT_NONE,
        )
        load(config)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        log.info("listening", address=f"{self._settings.host}:{self.port}", protocol="http")

    def hand_over(self, seconds: float) -> None:
        """Leave the port to whoever shares it; open requests have `seconds` to end."""
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = max(GRACE, int(seconds))
            self._server.should_exit = True

    async def stop(self) -> None:
        """Refuse new connections, let the last words out, close."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


def load(config: uvicorn.Config) -> None:
    """Read what the configuration names; raises ConfigError where a certificate cannot be used."""
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert_file, tls_key_file or tls_client_ca_file cannot be used: {error}") from error


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers have no end; the parser itself would gather them all."""

    _in_headers = False
    _num_header_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self.send_400_response("The request's headers are too long.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_headers, self._num_header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()


class _Server(uvicorn.Server):
    """Signals are the actor's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """A bound socket, which others may `share`; raises ConfigError where there is none to be had."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((bare, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror}; choose another http_port, or -1 for none"
        ) from error
    return listener
