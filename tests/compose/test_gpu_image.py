"""compose.gpu.yaml, as far as a machine without a GPU can try it: the image, its compiler and its cache."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from kernels.provider import has_triton
from scripts.bench.common.stack import ROOT, Stack
from tests.compose.stack import free_port, why_not

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


def test_triton_compiles_and_loads_in_the_worker_s_container(tmp_path: Path) -> None:
    if reason := why_not() or ("" if has_triton() else "triton is not installed"):
        pytest.skip(reason)
    version = importlib.metadata.version("triton")
    stack = Stack(f"pageant-gpu-{os.getpid()}", free_port(), tmp_path)
    stack.environment["TRITON_SPEC"] = f"triton=={version}"
    gpu = str(ROOT / "compose.gpu.yaml")
    stack.environment["COMPOSE_FILE"] = os.pathsep.join([stack.environment["COMPOSE_FILE"], gpu])
    worker = json.loads(stack.compose("config", "--format", "json"))["services"]["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and "gpu" in device["capabilities"]
    assert worker["read_only"] and worker["environment"]["PAGEANT_DEVICE"] == "cuda"

    without = tmp_path / "without.yaml"  # the container as it is, but for the device that is not here
    sources = {"environment": {"PYTHONPATH": f"{ROOT}:/app"}, "volumes": [f"{ROOT}:{ROOT}:ro"]}
    described = json.dumps({"services": {"worker": sources}}).replace('"worker": {', '"worker": {"deploy": !reset {}, ')
    without.write_text(described, encoding="utf-8")
    stack.environment["COMPOSE_FILE"] += f"{os.pathsep}{without}"
    stack.compose("build", "worker", timeout=1500)
    program = ["--workdir", str(ROOT), "--entrypoint", "python", "worker", "-m", "tests.compose.gpu_program"]
    try:
        printed = stack.compose("run", "--rm", "--no-deps", "-T", *program, timeout=600)
    finally:
        stack.down()
    found = json.loads(printed.splitlines()[-1])
    assert found["triton"] == version and not found["is_root"]
    assert min(found["compiled"]) > 1000, "bytes for sm_90"
    assert found["loaded"] == "CudaUtils" and found["cached"], "built by gcc there, loaded from the cache"
