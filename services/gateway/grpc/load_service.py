"""Load reports out of band: a stream of them to balancers that ask once, beside no request.

It speaks as xds.service.orca.v3.OpenRcaService, the service that gRPC's balancers call for this (gRFC A51).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from protos.pageant.v1 import load_report_pb2
from services.gateway.health.load_report import FRESH, LoadReports
from services.gateway.health.readiness import Readiness

SERVICE = "xds.service.orca.v3.OpenRcaService"
DEFAULT_INTERVAL = 30.0  # seconds between two reports where the caller does not say
SHORTEST_INTERVAL = FRESH


class LoadService:
    """Reports at the caller's interval until the caller, or the gateway, leaves."""

    def __init__(self, reports: LoadReports, readiness: Readiness) -> None:
        self._reports = reports
        self._readiness = readiness

    @property
    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        method = grpc.unary_stream_rpc_method_handler(
            self.stream_core_metrics,
            request_deserializer=load_report_pb2.LoadReportRequest.FromString,
            response_serializer=bytes,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"StreamCoreMetrics": method})

    async def stream_core_metrics(self, request: Any, context: Any) -> None:
        interval = interval_of(request)
        while not self._readiness.is_leaving:
            await self._reports.refresh()
            await context.write(self._reports.binary())
            await self._rest(interval)

    async def _rest(self, seconds: float) -> None:
        """Wait; a gateway that leaves ends the wait, since it would be kept by the stream."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._readiness.is_leaving:
                    await self._readiness.changed()


def interval_of(request: Any) -> float:
    """Seconds between two reports."""
    if not request.HasField("report_interval"):
        return DEFAULT_INTERVAL
    asked = request.report_interval
    return max(SHORTEST_INTERVAL, float(asked.seconds) + 1e-9 * float(asked.nanos))
