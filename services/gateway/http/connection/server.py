"""The HTTP server: uvicorn within the gateway's own event loop, without its signals, its logs and its files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from services.gateway.access.connections import Connections, make_connections
from services.gateway.http.connection.listener import Listener, listen
from services.gateway.http.connection.protocol import BoundedProtocol
from shared.config import AccessSettings, GatewaySettings
from shared.errors import ConfigError

log = structlog.get_logger()

GRACE = 1  # seconds that open connections have at the end


class HttpServer:
    """Listens on `http_port`; what it receives the application answers."""

    def __init__(self, app: ASGIApp, gateway: GatewaySettings, access: AccessSettings) -> None:
        self._gateway = gateway
        self._access = access
        self._app = app
        self.connections = make_connections(gateway)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen; raises ConfigError where the port is taken."""
        listener = listen(self._gateway.host, self._gateway.http_port, share=self._gateway.share_port)
        self.port = listener.getsockname()[1]
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong in an endpoint is logged by `defect`
        gateway, access = self._gateway, self._access
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
            timeout_keep_alive=math.ceil(gateway.idle_timeout),
            timeout_graceful_shutdown=GRACE,
            ssl_certfile=access.tls_cert_file or None,
            ssl_keyfile=access.tls_key_file or None,
            ssl_ca_certs=access.tls_client_ca_file or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if access.tls_client_ca_file else ssl.CERT_NONE,
        )
        load(config)
        self._server = _Server(config, self.connections, header_timeout=gateway.header_timeout)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        log.info("listening", address=f"{self._gateway.host}:{self.port}", protocol="http")

    def hand_over(self, seconds: float) -> None:
        """Leave the port to the gateways that share it; open requests have `seconds` to end."""
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = max(GRACE, int(seconds))
            self._server.should_exit = True

    async def stop(self) -> None:
        """Refuse new connections, send the last answers, close."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


def load(config: uvicorn.Config) -> None:
    """Read what the configuration names; raises ConfigError where a certificate cannot be used."""
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert_file, tls_key_file or tls_client_ca_file cannot be used: {error}") from error


class _Server(uvicorn.Server):
    """Signals are the process's, and connections are taken by our own listener."""

    def __init__(self, config: uvicorn.Config, connections: Connections, *, header_timeout: float) -> None:
        super().__init__(config)
        self._connections = connections
        self._header_timeout = header_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        assert sockets is not None  # `serve` is always given ours
        server: Any = Listener(
            sockets[0],
            self._protocol,
            self._connections,
            tls=self.config.ssl,
            handshake_timeout=self._header_timeout,
        )
        self.servers = [server]
        self.started = True

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            header_timeout=self._header_timeout,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
