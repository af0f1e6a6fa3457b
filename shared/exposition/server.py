"""/metrics of one service, on a port of its own; its threads never touch an actor's state.

An actor's metrics are collected on its event loop, which owns them; the thread of a scrape waits for that.  Every
client gets the plain text format: in OpenMetrics, which Prometheus prefers, prometheus_client writes `vllm:` as
`vllm_`, and dashboards would not find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import socketserver
import time
from collections.abc import Callable, Iterable, Iterator
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CONTENT_TYPE_LATEST, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from shared.exposition.families import exposition
from shared.processes.descriptors import is_exhausted

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

PATIENCE = 2.0  # seconds that a scrape waits for the event loop
MAX_CONNECTIONS = 16  # each has a thread
MAX_SECONDS = 10.0  # that one may take while others wait
REST_SECONDS = 0.5  # where there is no descriptor for a connection
PATHS = ("/metrics", "/")


class _Bounded(ThreadingWSGIServer):
    """At most `MAX_CONNECTIONS` at a time.  Beyond, the newest takes the place of one that is open for too long, or is
    refused."""

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._since: dict[Any, float] = {}  # connection -> monotonic seconds, oldest first
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the base class's look-up of the host's name: the event loop would wait for name servers."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if is_exhausted(error):  # the listening socket stays readable: without a rest this thread would spin
                time.sleep(REST_SECONDS)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        now = time.monotonic()
        connections = list(self._since.items())
        if len(connections) >= MAX_CONNECTIONS:
            oldest, since = connections[0]
            if now - since < MAX_SECONDS:
                return False
            self._since.pop(oldest, None)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        self._since[request] = now
        return True

    def shutdown_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().shutdown_request(request)


class _Silent(WSGIRequestHandler):
    timeout = MAX_SECONDS  # without a byte

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


class MetricsServer(Collector):
    """Listens until it is closed."""

    def __init__(self, host: str, port: int, collectors: Callable[[], list[Collector]]) -> None:
        """Raises OSError where the port cannot be had.  To be made on the event loop that `collectors` needs."""
        self._loop, self._collectors = asyncio.get_running_loop(), collectors
        self._process: list[Collector] = [ProcessCollector(registry=None), PlatformCollector(registry=None)]
        self._server: _Bounded = make_server(host, port, self._answer, server_class=_Bounded, handler_class=_Silent)
        self.port = int(self._server.server_port)
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def collect(self) -> Iterator[Metric]:
        """The service's own metrics, collected on its event loop while this thread waits."""
        yield from asyncio.run_coroutine_threadsafe(self._gather(), self._loop).result(PATIENCE)

    async def _gather(self) -> list[Metric]:
        return [metric for collector in self._collectors() for metric in collector.collect()]

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") not in PATHS:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        body = exposition(self, *self._process)
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST), ("Content-Length", str(len(body)))])
        return [body]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
