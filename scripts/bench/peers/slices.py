"""Engines run the same workload at once, and at any moment all processes of all but one of them are stopped.

A machine's speed drifts by more than two versions differ, from one second to the next where a hypervisor shares its
cores and its memory.  In slices of a quarter of a second all have the same good and bad seconds.  What counts is the
time that each was awake until it had answered.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from scripts.bench.common.deployment import signal_all
from scripts.bench.peers.child import EngineFailed, EngineProcess
from scripts.bench.peers.workloads import Request

SLICE_SECONDS = 0.25


def run_in_slices(
    children: Sequence[EngineProcess], requests: list[Request], timeout: float, slice_seconds: float = SLICE_SECONDS
) -> list[float | EngineFailed]:
    """Seconds that each was awake, or why it has not answered; the first slice is the first one's.

    `timeout`: of each alone.  All are awake at the end.
    """
    awake = [0.0] * len(children)
    pids = [child.pids for child in children]
    with ThreadPoolExecutor(len(children)) as threads:
        for some in pids:
            signal_all(some, signal.SIGSTOP)
        answers = [threads.submit(child.run, requests, timeout * len(children)) for child in children]
        try:
            while not all(answer.done() for answer in answers):
                for place, answer in enumerate(answers):
                    if not answer.done():
                        awake[place] += _slice(pids[place], answer, slice_seconds)
        finally:
            for some in pids:
                signal_all(some, signal.SIGCONT)
    return [_outcome(answer) or seconds for answer, seconds in zip(answers, awake, strict=True)]


def _outcome(answer: Future[dict[str, Any]]) -> EngineFailed | None:
    error = answer.exception()
    if error is not None and not isinstance(error, EngineFailed):
        raise error
    return error


def _slice(pids: Sequence[int], answer: Future[dict[str, Any]], slice_seconds: float) -> float:
    """How long these processes were awake: the slice, or until they answered."""
    begin = time.perf_counter()
    signal_all(pids, signal.SIGCONT)
    wait([answer], slice_seconds)
    seconds = time.perf_counter() - begin
    if not answer.done():
        signal_all(pids, signal.SIGSTOP)
    return seconds
