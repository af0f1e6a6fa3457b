"""/metrics of one service, on a port of its own: prometheus_client's server; its threads never touch an actor's state.

What is told is put together on the actor's event loop, which owns it; a thread that is asked waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

PATIENCE = 2.0  # seconds that a scrape waits for the event loop

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


class MetricsServer:
    """Listens until it is closed."""

    def __init__(self, host: str, port: int, collectors: Collectors) -> None:
        """Raises OSError where the port cannot be had.  To be made on the event loop that has what is told."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_FromLoop(asyncio.get_running_loop(), collectors))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._server: WSGIServer
        self._server, self._thread = start_http_server(port, host, registry)
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
