"""Run in a container of the GPU image, without a GPU: what Triton needs there besides one.

Compiles a kernel for sm_90, and builds and loads Triton's own module in C against a stand-in for the driver's library.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from pathlib import Path

import torch
import triton
from triton.backends.nvidia import driver

from scripts.bench.gpu.shapes import LLAMA_3_8B
from tests.kernels.triton.compiling_ahead import HOPPER, compiling
from tests.kernels.triton.launches import Catalogue

KERNEL = "rms_norm"
CALLED = (
    "cuCtxGetCurrent cuCtxGetDevice cuCtxGetLimit cuCtxSetCurrent cuCtxSetLimit cuDeviceGet cuDeviceGetAttribute "
    "cuDeviceGetCount cuDevicePrimaryCtxRetain cuDriverGetVersion cuFuncGetAttribute cuFuncSetAttribute "
    "cuFuncSetCacheConfig cuGetErrorString cuInit cuLaunchKernelEx cuMemGetInfo cuModuleGetFunction cuModuleLoadData "
    "cuModuleUnload cuOccupancyMaxActiveClusters cuPointerGetAttribute cuStreamIsCapturing cuTensorMapEncodeTiled"
)


def stand_in(directory: Path) -> Path:
    """A libcuda.so.1 whose functions do nothing."""
    directory.mkdir()
    source, library = directory / "driver.c", directory / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in CALLED.split()), encoding="utf-8")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library


def main() -> None:
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    with compiling(HOPPER) as compiled:
        for name, launch in Catalogue(LLAMA_3_8B, torch.bfloat16).launches():
            if name == KERNEL:
                launch()
    library = stand_in(cache / "stand-in")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    loaded = type(driver.CudaUtils()).__name__
    found = {
        "triton": triton.__version__,
        "compiled": [len(one.assembly["cubin"]) for one in compiled],
        "loaded": loaded,
        "cached": len(list(cache.rglob("*cuda_utils*"))),
        "is_root": os.getuid() == 0,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
