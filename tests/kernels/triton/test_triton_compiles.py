"""Every kernel compiles for the GPUs that it is meant for, in a process that does not interpret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.provider import has_triton

A_FEW_BYTES = 32  # of a thread: versions of triton differ by that much
SHARED_BYTES = 232_448  # that one program can have there
EARLY = {"norm_rows", "multiply_row", "activate_rows", "turn_and_store", "attend_tiles", "merge_parts"}
ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import torch
from kernels.triton import launch
from scripts.bench.gpu.shapes import LLAMA_3_8B
from tests.kernels.triton.compiling_ahead import HOPPER, MI300, compiling
from tests.kernels.triton.launches import Catalogue
launch.launches_early = lambda device: {early}
with compiling({target}, variants={variants}) as compiled:
    for name, launch in Catalogue(LLAMA_3_8B, torch.bfloat16).launches():
        launch()
for one in compiled:
    print(one.name, {fact})
"""


def compile_for(target: str, fact: str, *, variants: bool = True, early: bool = False) -> dict[str, list[str]]:
    """Kernel -> what is asked of each of its variants, or of one of them."""
    if not has_triton():
        pytest.skip("triton is not installed")
    program = PROGRAM.format(target=target, fact=fact, variants=variants, early=early)
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
    """Small tiles multiply by mma, large ones by wgmma; and what may begin early waits for what is before it."""
    ptx = "one.assembly['ptx']"
    waits = f"one.is_early, {ptx}.count('griddepcontrol.wait')"
    fact = f"one.resources()[1], one.shared, {waits}, 'wgmma' in {ptx}, 'mma.sync' in {ptx}"
    found = compile_for("HOPPER", fact, early=True)
    told = [one.split(maxsplit=4) for variants in found.values() for one in variants]
    assert len(found) >= 18
    assert max(int(shared) for _, shared, *_ in told) <= SHARED_BYTES
    assert max(int(spilled) for spilled, *_ in told) <= A_FEW_BYTES
    assert {(is_early, count) for _, _, is_early, count, _ in told} == {("True", "1"), ("False", "0")}
    assert {name for name, variants in found.items() if any(one.split()[2] == "True" for one in variants)} == EARLY
    assert {"True False", "False True"} <= {one.split(maxsplit=4)[4] for one in found["attend_tiles"]}


def test_for_an_amd_gpu() -> None:
    """Variants differ in what they compute, not in what this compiler can do, and it takes two minutes for all."""
    found = compile_for("MI300", "len(one.assembly['hsaco'])", variants=False)
    assert len(found) >= 18


ROUNDED = """
import re
import torch
from kernels.interface import AttentionShape
from kernels.ops.attention.kv_cache import KVCache
from kernels.provider import triton_kernels
from kernels.triton.linears.linear_int8 import quantise_rows
from tests.kernels.triton.compiling_ahead import HOPPER, compiling
with compiling(HOPPER) as compiled:
    quantise_rows(torch.zeros(2, 64))
    octets, scales = torch.zeros(2, 4, 2, 64, dtype=torch.int8), torch.zeros(2, 4, 2)
    cache = KVCache(octets, octets, scales, scales)
    triton_kernels(AttentionShape()).store_kv(torch.zeros(3, 2, 64), torch.zeros(3, 2, 64), cache, torch.arange(3))
for one in compiled:
    added = [line for line in one.assembly["ptx"].splitlines() if "0f4B400000" in line]
    print(one.name, "added" if added else "", "fused" if any("fma" in line for line in added) else "")
"""


def test_what_becomes_int8_is_rounded_before_it_is_cut_to_an_integer() -> None:
    """A compiler that joins the product with the addition of 1.5 x 2**23 would round once: other codes near halves."""
    if not has_triton():
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", ROUNDED], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line.split()[1:] for line in done.stdout.splitlines()]
    assert told == [["added"], ["added"]], done.stdout
