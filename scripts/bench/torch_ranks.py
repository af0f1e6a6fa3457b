"""What ranks that compute with torch cost over gloo, on a CPU, by each way to exchange (`bench_ranks --torch`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from statistics import median
from typing import Any

import torch

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from scripts.bench.common.report import Result
from scripts.bench.decoded_rows import DecodedRows
from shared.config import Settings

Grouped = Callable[[Settings], AbstractContextManager[tuple[ModelRunner, Any]]]
DUAL = {"enable_dbo": True, "dbo_token_threshold": 2}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "gather": {},
    "gather, dual batch": DUAL,
    "reduce": {"tensor_parallel_reduce": True},
    "reduce, dual batch": {"tensor_parallel_reduce": True, **DUAL},
}


def measure_torch(
    settings: Settings, grouped: Grouped, ranks: int, all_rows: tuple[int, ...], rounds: int, steps: int
) -> list[Result]:
    """One process with a thread for each rank, and groups of ranks with a thread each, decode the same rows in turns.

    Raises RuntimeError where ranks that gather say other tokens than one process.
    """
    settings = settings.replace(device="cpu", kernels="torch")
    found = []
    with ExitStack() as stack:
        alone = load_runner(settings)
        groups = {name: stack.enter_context(grouped(settings.replace(**way)))[0] for name, way in WAYS.items()}
        for rows in all_rows:
            runs = {name: _rows(runner, rows, rounds * steps, 1) for name, runner in groups.items()}
            one = _rows(alone, rows, rounds * steps, ranks)
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
            for _ in range(rounds):
                torch.set_num_threads(ranks)
                seconds, wanted = one.steps(steps)
                torch.set_num_threads(1)
                for name, run in runs.items():
                    own, tokens = run.steps(steps)
                    if tokens != wanted and name.startswith("gather"):
                        raise RuntimeError(f"{ranks} ranks ({name}) say other tokens than one process at {rows} rows")
                    times[name].append((1000 * own, 1000 * seconds))
            found += [_line(f"step of {ranks} torch ranks, {rows} rows, {name}", times[name]) for name in WAYS]
    return found


def _rows(runner: ModelRunner, rows: int, steps: int, threads: int) -> DecodedRows:
    torch.set_num_threads(threads)
    return DecodedRows(runner, rows, steps)


def _line(what: str, times: list[tuple[float, float]]) -> Result:
    note = f"{median(own for own, _ in times):.1f} ms beside {median(one for _, one in times):.1f} ms"
    return Result(what, median(own / one for own, one in times), "x", note=note)
