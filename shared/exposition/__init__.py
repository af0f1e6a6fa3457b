"""Metrics as Prometheus reads them: one place for the names.  docs/reference/metrics.md lists them.

Names that begin with `vllm:` are vLLM's and mean what they mean there, so that its dashboards, and the Kubernetes
inference gateway, read them; the others begin with `pageant_`.
"""

from __future__ import annotations

from shared.exposition.batches import BatchMeter
from shared.exposition.engine import EngineCollector
from shared.exposition.families import exposition
from shared.exposition.process import ProcessState, ServiceCollector
from shared.exposition.requests import RequestMeter
from shared.exposition.store import Shelf, StoreCollector, StoreState

__all__ = [
    "BatchMeter",
    "EngineCollector",
    "ProcessState",
    "RequestMeter",
    "ServiceCollector",
    "Shelf",
    "StoreCollector",
    "StoreState",
    "exposition",
]
