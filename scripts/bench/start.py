"""From `pageant serve` to ready, and from the death of a worker to the next token.

    scripts/bench_start [--check] [--rounds 5] [--models DIR]

Ready is when the standard gRPC health service says SERVING.  Each start is one of a deployment that ran before: files
are in the page cache, kernels are compiled, the digest of the weights is remembered.  A worker is replaced by killing
it (SIGKILL) and asking for one token at once: the time until it comes holds that its death is noticed, that another
process starts and loads the model, and one step.  Figures are medians; processor time is that of all processes, which
tells a busy machine from a slow start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.common.deployment import ServedDeployment
from scripts.bench.common.models import kept
from scripts.bench.common.proc import processor
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.common.tokens import MODEL
from services.cli.display.client import TerminalClient

READY = {"bundled": 2.5, "M": 4.0}  # seconds, as a target
REPLACED = 2.0
ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0}
WARM_UP = 1  # rounds that nothing is measured of
PAUSE = 0.5  # seconds in which a deployment that is ready comes to rest


def measure(settings: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of one start and of one replacement."""
    begin = time.perf_counter()
    with ServedDeployment(dict(settings)) as deployment:
        ready = time.perf_counter() - begin
        busy = deployment.cpu_seconds
        ask(deployment.address)
        time.sleep(PAUSE)
        (worker,) = deployment.pids("worker")
        os.kill(worker, signal.SIGKILL)
        begin = time.perf_counter()
        ask(deployment.address)
        return {"ready": ready, "processor": busy, "replaced": time.perf_counter() - begin}


def ask(address: str) -> None:
    """One token.  Raises grpc.RpcError."""
    with closing(TerminalClient(address)) as client:
        client.generate(ONE_TOKEN, lambda _: None, text="Once")


def report(name: str, rounds: list[dict[str, float]]) -> list[Result]:
    middle = {figure: median(one[figure] for one in rounds) for figure in rounds[0]}
    return [
        Result(f"{name}: ready", middle["ready"], "s", at_most=READY[name]),
        Result(f"{name}: processor time until ready", middle["processor"], "s"),
        Result(f"{name}: worker killed, next token", middle["replaced"], "s", at_most=REPLACED),
    ]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=Path, help="where model M is, or is made and kept; default: made for this run")
    args = parser.parse_args()
    lines = []
    with kept(args.models, "M") as made:
        for name, model in (("bundled", MODEL), ("M", made)):
            rounds = [measure({"model": str(model)}) for _ in range(WARM_UP + args.rounds)]
            lines += report(name, rounds[WARM_UP:])
            print(f"{name}: {len(rounds) - WARM_UP} rounds", flush=True)
    return finish(lines, check=args.check, title=f"from start to ready; {processor()}")
