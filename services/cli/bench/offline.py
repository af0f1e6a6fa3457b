"""`pageant bench offline`: how fast a private troupe is through a load that it gets all at once."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from services.cli.bench.serve import ServeOptions, serve
from services.cli.private import with_private_troupe
from services.cli.workloads import WorkloadOptions
from shared.config import Settings


def offline(settings: Settings, options: ServeOptions, workload: WorkloadOptions, sampling: dict[str, Any]) -> int:
    """Start, measure as `bench serve` does at an infinite rate, shut down; returns the exit status."""
    at_once = workload
    if not options.request_rates and workload.request_rate is None:
        at_once = msgspec.structs.replace(workload, request_rate=math.inf)

    def work(private: Settings) -> int:
        address = f"127.0.0.1:{private.gateway.port}"
        return serve(msgspec.structs.replace(options, address=address), at_once, sampling)

    return with_private_troupe(settings, work)
