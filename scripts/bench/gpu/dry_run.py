"""A rehearsal without a GPU: floors, every kernel compiled for sm_90 and run on tiny tensors, every import made.

Compiling and interpreting exclude one another in one process, so each has its own:

    python -m scripts.bench.gpu.dry_run compile | interpret
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import structlog
import torch

from scripts.bench.gpu.shapes import LLAMA_3_8B, TINY
from scripts.bench.report import Line, table

PARTS = ("ceilings", "attention", "steps", "others")


def rehearse(lines: Sequence[Line]) -> int:
    """Returns the exit status: 1 where something would not run."""
    for part in PARTS:
        importlib.import_module(f"scripts.bench.gpu.{part}")
    status = 0
    for mode, interpret in (("compile", "0"), ("interpret", "1")):
        command = [sys.executable, "-m", "scripts.bench.gpu.dry_run", mode]
        status |= subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": interpret}, check=False).returncode
    print(f"\n{table(lines, title='what would be measured')}", flush=True)
    return int(status != 0)


def compile_all() -> None:
    """Registers, spills and shared memory of each kernel, in bfloat16."""
    from scripts.bench.gpu.ahead import HOPPER, compiling
    from scripts.bench.gpu.catalogue import Catalogue

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
    from scripts.bench.gpu.catalogue import Catalogue
    from scripts.bench.gpu.steps import Runs

    launches = list(Catalogue(TINY, torch.bfloat16).launches())
    for _, launch in launches:
        launch()
    print(f"\ninterpreted on tiny tensors: {len(launches)} launches")
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(TINY.write(Path(folder)), TINY, device="cpu", num_rows=2, max_len=128)
        runs.decode(2, 40)
        runs.prefill(64)
    print("steps of a tiny model on the CPU: decode and prefill")


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    (compile_all if sys.argv[1] == "compile" else interpret_all)()
