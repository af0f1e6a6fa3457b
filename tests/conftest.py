"""Fixtures that tests of every kind share."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.short import BUDGETS, chosen, read_table

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = pytest.StashKey[list[str]]()
HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))

if not HAS_GPU:  # before anything imports triton: its kernels then run in numpy, one program after the other
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Before anything imports torch: its threads sleep where they wait for one of them that has no core, beside other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected is no garbage: it is not looked through for any, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Each of pytest-xdist's processes begins with another folder to collect, so that they read each other's bytecode:
    in a fresh clone all would else compile the same file at the same time."""
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    config.stash[FOLDERS] = list(config.args)
    if worker:
        turn = int(worker["workerid"].removeprefix("gw")) * len(config.args) // worker["workercount"]
        config.args[:] = config.args[turn:] + config.args[:turn]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only", choices=BUDGETS, help="of tests that take long, what tests/NAME.txt says")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order that was asked for, without what a shorter run leaves out."""
    if table := config.getoption("--only"):
        played = chosen([item.nodeid for item in items], read_table(table))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in played])
        items[:] = [item for item in items if item.nodeid in played]
    if config.args != config.stash[FOLDERS]:
        roots = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.stash[FOLDERS]]
        items.sort(key=lambda item: next(place for place, root in enumerate(roots) if item.path.is_relative_to(root)))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's, with a shorter name: sockets lie in it, and the name of one has at most 107 bytes."""
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:12])


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The shared test data, which is no part of the repository; PAGEANT_TEST_DATA says where else it is."""
    path = Path(os.environ.get("PAGEANT_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set PAGEANT_TEST_DATA to where it is")
    return path
