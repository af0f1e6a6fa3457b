"""/metrics of one service, on a port of its own; its threads never touch an actor's state.

What is told is put together on the actor's event loop, which owns it; a thread that is asked waits for that.  It is
told in the plain text format to everybody: in OpenMetrics, which Prometheus would rather have, prometheus_client spells
`vllm:` as `vllm_`, and no dashboard would find it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CONTENT_TYPE_LATEST, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from shared.exposition.text import exposition

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

PATIENCE = 2.0  # seconds that a scrape waits for the event loop
PATHS = ("/metrics", "/")

Collectors = Callable[[], list[Collector]]


class _FromLoop(Collector):
    """Collects on the event loop what is told in a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, collectors: Collectors) -> None:
        self._loop = loop
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        yield from asyncio.run_coroutine_threadsafe(self._gather(), self._loop).result(PATIENCE)

    async def _gather(self) -> list[Metric]:
        return [metric for collector in self._collectors() for metric in collector.collect()]


class _Server4(ThreadingWSGIServer):
    address_family = socket.AF_INET


class _Server6(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no event."""


class MetricsServer:
    """Listens until it is closed."""

    def __init__(self, host: str, port: int, collectors: Collectors) -> None:
        """Raises OSError where the port cannot be had.  To be made on the event loop that has what is told."""
        self._told: list[Collector] = [
            _FromLoop(asyncio.get_running_loop(), collectors),
            ProcessCollector(registry=None),
            PlatformCollector(registry=None),
        ]
        server = _Server6 if ":" in host else _Server4
        self._server = make_server(host, port, self._answer, server_class=server, handler_class=_Silent)
        self.port = int(self._server.server_port)
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") not in PATHS:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        body = exposition(*self._told)
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST), ("Content-Length", str(len(body)))])
        return [body]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
