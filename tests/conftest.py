"""Fixtures that tests of every kind share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))

if not HAS_GPU:  # before anything imports triton: its kernels then run in numpy, one program after the other
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The shared test data, which is no part of the repository; PAGEANT_TEST_DATA says where else it is."""
    path = Path(os.environ.get("PAGEANT_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set PAGEANT_TEST_DATA to where it is")
    return path
