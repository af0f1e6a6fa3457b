"""What it costs to know: two troupes side by side, one with tracing and one without, loaded in turn."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from statistics import median
from typing import Any

from scripts.bench.troupe import LocalDeployment, troupe

NUM_STREAMS = 64
NUM_TOKENS = 200  # of a request, whose lines and latency are the price
WARM = 1.0  # seconds of a round that do not count


def rates(num_rounds: int, seconds: float, step_ms: float) -> tuple[list[float], list[float]]:
    """Tokens per second of each round, with and without; which comes first changes with every round."""
    with ExitStack() as stack:
        size: Any = {"max_num_seqs": NUM_STREAMS, "log_level": "info"}
        arms = [stack.enter_context(troupe(step_ms, tracing=tracing, **size)) for tracing in (True, False)]
        found: tuple[list[float], list[float]] = [], []
        for number in range(num_rounds + 1):
            for arm in (0, 1) if number % 2 else (1, 0):
                rate = _rate(arms[arm], seconds)
                if number:
                    found[arm].append(rate)
    return found


def _rate(running: LocalDeployment, seconds: float) -> float:
    command = [sys.executable, "-m", "scripts.bench.clients", "--address", running.address]
    for name, value in (("streams", NUM_STREAMS), ("seconds", seconds), ("tokens", NUM_TOKENS), ("channels", 4)):
        command += [f"--{name}", str(value)]
    said = [json.loads(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()]
    if said[-1]["wrong"]:
        raise RuntimeError(f"streams went wrong: {said[-1]['wrong'][:3]}")
    full = [one for one in said[:-1] if WARM <= one["time"] - said[0]["time"] <= seconds]
    return float((full[-1]["tokens"] - full[0]["tokens"]) / (full[-1]["time"] - full[0]["time"]))


def loss(with_tracing: list[float], without: list[float]) -> float:
    """Percent of throughput that tracing costs: the median over rounds, each compared with its own neighbour."""
    return 100 * (1 - median(on / off for on, off in zip(with_tracing, without, strict=True)))
