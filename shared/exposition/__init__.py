"""Metrics as Prometheus reads them: one place for the names.  docs/reference/metrics.md lists them.

Names that begin with `vllm:` are vLLM's and mean what they mean there, so that its dashboards, and the Kubernetes
inference gateway, read them; the others begin with `pageant_`.
"""

from __future__ import annotations

from shared.exposition.engine import EngineCollector
from shared.exposition.families import exposition
from shared.exposition.process import ProcessState, ServiceCollector
from shared.exposition.requests import RequestMeter

__all__ = ["EngineCollector", "ProcessState", "RequestMeter", "ServiceCollector", "exposition"]
