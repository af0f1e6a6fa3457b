"""The text that Prometheus reads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector


def exposition(*collectors: Collector) -> bytes:
    """All of these at this moment, in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)
