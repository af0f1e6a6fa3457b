"""Every kernel compiles for the GPUs that it is meant for, in a process that does not interpret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.provider import has_triton

A_FEW_BYTES = 32  # of a thread: versions of triton differ by that much
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from scripts.bench.gpu.shapes import LLAMA_3_8B
from tests.kernels.compiling_ahead import HOPPER, MI300, compiling
from tests.kernels.launches import Catalogue
with compiling({target}, variants={variants}) as compiled:
    for name, launch in Catalogue(LLAMA_3_8B, torch.bfloat16).launches():
        launch()
for one in compiled:
    print(one.name, {fact})
"""


def compile_for(target: str, fact: str, *, variants: bool = True) -> dict[str, list[str]]:
    """Kernel -> what is asked of each of its variants, or of one of them."""
    if not has_triton():
        pytest.skip("triton is not installed")
    program = PROGRAM.format(target=target, fact=fact, variants=variants)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, told = line.split(maxsplit=1)
        found.setdefault(name, []).append(told)
    return found


def test_for_hopper_with_everything_in_registers() -> None:
    """Small tiles multiply by mma, large ones by wgmma."""
    ptx = "one.assembly['ptx']"
    found = compile_for("HOPPER", f"one.resources()[1], 'wgmma' in {ptx}, 'mma.sync' in {ptx}")
    assert len(found) >= 18
    assert max(int(told.split()[0]) for variants in found.values() for told in variants) <= A_FEW_BYTES
    assert {"True False", "False True"} <= {told.split(maxsplit=1)[1] for told in found["attend_tiles"]}


def test_for_an_amd_gpu() -> None:
    """Variants differ in what they compute, not in what this compiler can do, and it takes two minutes for all."""
    found = compile_for("MI300", "len(one.assembly['hsaco'])", variants=False)
    assert len(found) >= 18
