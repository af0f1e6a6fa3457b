"""An actor's /metrics, where it has a port for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from shared.config import GatewaySettings, ObservationSettings

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from shared.exposition.server import MetricsServer

log = structlog.get_logger()

SHARED_PORTS = 10


class MetricsPort:
    """Listens as soon as it can: a predecessor of the same place may still have the port.  Nothing depends on it."""

    def __init__(
        self, observation: ObservationSettings, gateway: GatewaySettings, collectors: Callable[[], list[Collector]]
    ) -> None:
        self._observation = observation
        self._gateway = gateway
        self._collectors = collectors
        self._has_complained = False
        self.server: MetricsServer | None = None

    def open(self) -> None:
        """Try to listen, unless it listens already or has no port."""
        if self.server is not None or self._observation.metrics_port < 0:
            return
        from shared.exposition.server import MetricsServer  # loaded only where there is a port

        host, reason = self._gateway.host.strip("[]"), ""
        for port in self._ports():
            try:
                self.server = MetricsServer(host, port, self._collectors)
            except OSError as error:
                reason = str(error)
            else:
                log.info("listening", address=f"{host}:{self.server.port}", protocol="metrics")
                return
        if not self._has_complained:
            log.warning("metrics_wait", address=f"{host}:{self._observation.metrics_port}", reason=reason)
        self._has_complained = True

    def _ports(self) -> range:
        """A gateway that shares its ports takes the next free one for its own metrics."""
        first = self._observation.metrics_port
        return range(first, min(first + SHARED_PORTS, 65536) if self._gateway.share_port and first else first + 1)

    def close(self) -> None:
        """Does not wait for its threads, which may wait for the event loop that calls this."""
        if self.server is not None:
            threading.Thread(target=self.server.close, daemon=True).start()
            self.server = None
