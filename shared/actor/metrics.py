"""An actor's /metrics, where it has a port for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from shared.config import Settings

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from shared.exposition.server import MetricsServer

log = structlog.get_logger()


class MetricsPort:
    """Listens as soon as it can: a predecessor of the same place may still have the port.  Nothing depends on it."""

    def __init__(self, settings: Settings, collectors: Callable[[], list[Collector]]) -> None:
        self._settings = settings
        self._collectors = collectors
        self._has_complained = False
        self.server: MetricsServer | None = None

    def open(self) -> None:
        """Try, unless it listens already or is not to."""
        if self.server is not None or self._settings.metrics_port < 0:
            return
        from shared.exposition.server import MetricsServer  # nobody else pays for it

        host, port = self._settings.host.strip("[]"), self._settings.metrics_port
        try:
            self.server = MetricsServer(host, port, self._collectors)
        except OSError as error:
            if not self._has_complained:
                log.warning("metrics_wait", address=f"{host}:{port}", reason=str(error))
            self._has_complained = True
        else:
            log.info("listening", address=f"{host}:{self.server.port}", protocol="metrics")

    def close(self) -> None:
        """Without waiting for its threads, which may wait for the event loop that asks for this."""
        if self.server is not None:
            threading.Thread(target=self.server.close, daemon=True).start()
            self.server = None
