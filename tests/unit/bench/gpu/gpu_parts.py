"""Goes through parts of scripts/bench_gpu with a tiny model on the CPU: steps, a load offline, a soak, a timeline.

A program, so that a test can run it where little is installed; what goes through gRPC runs only where its wheel is.  (A
CPU's timeline has no events of a device: what is tried is how it comes about.)
"""

from __future__ import annotations

import importlib
import tempfile
from importlib.util import find_spec
from pathlib import Path

from scripts.bench.gpu.shapes import TINY
from scripts.bench.gpu.soak import run_soak, soak_settings
from scripts.bench.gpu.steps import Runs, offline_throughput
from scripts.bench.gpu.timeline import read_events, record_timeline

SOAK_SECONDS = 3


def main() -> None:
    importlib.import_module("scripts.bench.gpu.main")  # which imports all parts
    with tempfile.TemporaryDirectory() as folder:
        directory = TINY.write(Path(folder))
        runs = Runs(directory, device="cpu", num_rows=2, max_len=128)
        runs.decode(2, 40)
        runs.prefill(64)
        offline_throughput(runs.runner, 5, 20, 8, 64)
        sizes = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_num_draft_tokens": 3}
        soak = run_soak(soak_settings(directory, "cpu", **sizes), SOAK_SECONDS)
        print(f"a load offline, a soak of {soak.num_steps} steps: {soak.counts}")
        if find_spec("grpc") is not None:
            trace = record_timeline(
                directory, Path(folder) / "t.json", device="cpu", num_seqs=2, context=16, num_output=104
            )
            print(f"a timeline of {trace.stat().st_size} bytes, {len(read_events(trace))} device events")


if __name__ == "__main__":
    main()
