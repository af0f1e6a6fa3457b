"""Metrics as Prometheus reads them: one place for the names.  docs/reference/metrics.md lists them.

Names that begin with `vllm:` are vLLM's and mean what they mean there, so that its dashboards, and the Kubernetes
inference gateway, read them; the others begin with `pageant_`.
"""

from __future__ import annotations

from shared.exposition.engine import EngineCollector
from shared.exposition.process import ProcessState, process_collector
from shared.exposition.requests import RequestMeter
from shared.exposition.text import exposition

__all__ = ["EngineCollector", "ProcessState", "RequestMeter", "exposition", "process_collector"]
