"""A rehearsal without a GPU: floors, every kernel compiled for sm_90 and run on tiny tensors, every import made.

Parts of the table are gone through with a tiny model on the CPU: steps, a load offline, a soak.

It needs torch, triton and the few wheels of the messages; what goes through gRPC is rehearsed where its wheel is, too.
Compiling and interpreting exclude one another in one process, so each has its own:

    python -m scripts.bench.gpu.dry_run compile | interpret | parts
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import structlog
import torch

from scripts.bench.common.report import Result, table
from scripts.bench.gpu.ahead import HOPPER, compiling
from scripts.bench.gpu.catalogue import Catalogue
from scripts.bench.gpu.shapes import LLAMA_3_8B, TINY
from scripts.bench.gpu.soak import run_soak, soak_settings
from scripts.bench.gpu.steps import Runs, offline_throughput
from scripts.bench.gpu.timeline import read_events, record_timeline

SOAK_SECONDS = 3


def rehearse(lines: Sequence[Result]) -> int:
    """Returns the exit status: 1 where something would not run."""
    status = 0
    for mode, interpret in (("compile", "0"), ("interpret", "1"), ("parts", "1")):
        command = [sys.executable, "-m", "scripts.bench.gpu.dry_run", mode]
        status |= subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": interpret}, check=False).returncode
    print(f"\n{table(lines, title='what would be measured')}", flush=True)
    return int(status != 0)


def compile_all() -> None:
    """Registers, spills and shared memory of each kernel, in bfloat16."""
    print(f"{'compiled for sm_90':32} {'kernel':24} warps  registers  spilled  shared")
    with compiling(HOPPER) as compiled:
        for name, launch in Catalogue(LLAMA_3_8B, torch.bfloat16).launches():
            before = len(compiled)
            launch()
            for one in compiled[before:]:
                registers, spilled = one.resources()
                print(
                    f"{name:32} {one.name:24} {one.num_warps:5} {registers:10} {spilled:8} {one.shared:7}", flush=True
                )


def interpret_all() -> None:
    launches = list(Catalogue(TINY, torch.bfloat16).launches())
    for _, launch in launches:
        launch()
    print(f"\ninterpreted on tiny tensors: {len(launches)} launches")


def rehearse_parts() -> None:
    """The programs of the table, on the CPU."""
    importlib.import_module("scripts.bench.gpu.main")  # which imports all parts
    with tempfile.TemporaryDirectory() as folder:
        directory = TINY.write(Path(folder))
        runs = Runs(directory, device="cpu", num_rows=2, max_len=128)
        runs.decode(2, 40)
        runs.prefill(64)
        offline_throughput(runs.runner, 5, 20, 8, 64)
        sizes = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_num_draft_tokens": 3}
        soak = run_soak(soak_settings(directory, "cpu", **sizes), SOAK_SECONDS)
        print(
            f"a tiny model on the CPU: decode, prefill, a load offline, a soak of {soak.step_id} steps: {soak.counts}"
        )
        if find_spec("grpc") is not None:
            rehearse_timeline(directory, Path(folder))


def rehearse_timeline(directory: Path, folder: Path) -> None:
    """A CPU's trace has no events of a device: what is rehearsed is how it comes about."""
    trace = record_timeline(directory, folder / "t.json", device="cpu", num_seqs=2, context=16, num_output=104)
    print(f"a deployment on the CPU has recorded {trace.stat().st_size} bytes, {len(read_events(trace))} device events")


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    {"compile": compile_all, "interpret": interpret_all, "parts": rehearse_parts}[sys.argv[1]]()
