"""How loaded the deployment is, for clients and balancers that ask with a call: Open Request Cost Aggregation.

Asked for with the header `endpoint-load-metrics-format`.  The scheduler is asked only while clients want it; then
at most once a second.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable

from protos.pageant.v1 import load_report_pb2
from shared.errors import RequestError
from shared.messages import Load

ASKED = "endpoint-load-metrics-format"
ANSWER = "endpoint-load-metrics"
BINARY = "endpoint-load-metrics-bin"
FORMATS = ("TEXT", "JSON")
FRESH = 1.0  # seconds
TIMEOUT = 0.5  # seconds that a call waits for its first report


class LoadReports:
    """The last load that the scheduler reported.  `ask_load` asks it, and waits for so many seconds."""

    def __init__(self, ask_load: Callable[[float], Awaitable[Load]]) -> None:
        self._ask_load = ask_load
        self._load: Load | None = None
        self._at = float("-inf")

    async def refresh(self) -> None:
        """Ask for the load where the last one is old; it stays where no answer comes in time."""
        now = time.monotonic()
        if now - self._at < FRESH:
            return
        self._at = now  # calls that come meanwhile take the last one
        with contextlib.suppress(RequestError):
            self._load = await self._ask_load(TIMEOUT)

    @property
    def metrics(self) -> dict[str, float]:
        """By vLLM's names; empty while nothing is known."""
        load = self._load
        if load is None:
            return {}
        return {
            "kv_cache_usage_perc": float(load.kv_cache_usage),
            "num_requests_running": float(load.num_running),
            "num_requests_waiting": float(load.num_waiting),
        }

    def header(self, wanted: str) -> str:
        """The answer's header in a format that was asked for; empty where there is nothing to say or no such format."""
        metrics = self.metrics
        if not metrics or wanted.upper() not in FORMATS:
            return ""
        if wanted.upper() == "JSON":
            return f"JSON {json.dumps({'named_metrics': metrics})}"
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())

    def binary(self) -> bytes:
        """An OrcaLoadReport."""
        metrics = self.metrics
        usage = metrics.get("kv_cache_usage_perc", 0.0)
        report: bytes = load_report_pb2.LoadReport(
            named_metrics=metrics, application_utilization=usage
        ).SerializeToString()
        return report


def is_asked(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    return any(name == ASKED for name, _ in metadata)
