"""The wall clock of all processes is stepped by days under streams, and services die around each step: processes that
began before it and after it serve together, every stream is itself, and no deadline (of 240 s) ends one."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.system.harness import Troupe, ask, troupe

SOURCE = Path(__file__).parent / "stepped_clock.c"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
DAY = 86_400
OPTIONS = ("--workers", "2", "--num-threads", "1", "--num-blocks", "512", "--drain-timeout", "1")
STEPS = (
    (-10 * DAY, "scheduler"),  # a virtual machine that was restored, and the service that counts the epochs begins anew
    (20 * DAY, "scheduler"),
    (-400 * DAY, "worker"),
    (1_000 * DAY, "tokenizer"),
    (-600 * DAY, "detokenizer"),
)


class Clock:
    """How far the wall clocks of all processes are off, in whole seconds."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._offset = 0
        self._file.write_bytes(bytes(8))
        assert COMPILER is not None
        library = folder / "stepped_clock.so"
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "PAGEANT_TEST_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        self._offset += seconds
        with self._file.open("r+b") as file:  # written over: processes have it mapped
            file.write(self._offset.to_bytes(8, sys.byteorder, signed=True))


@pytest.mark.skipif(not COMPILER, reason="no C compiler for the clock that is stepped")
def test_streams_survive_clocks_that_are_stepped(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    asked = [
        ask("One day", seed=1, max_tokens=300, ignore_eos=True, temperature=0.8),
        ask("A little fox", seed=2, max_tokens=300, ignore_eos=True, temperature=1.0, n=2, frequency_penalty=0.3),
        ask("Once upon a time", seed=3, max_tokens=300, ignore_eos=True, stop=["never said"]),
    ]
    with troupe(tmp_path, *OPTIONS, environment=clock.environment) as running:
        wanted = running.generate(asked)
        for seconds, service in STEPS:
            answers = asyncio.run(running.disturb(asked, service, at_most=1, first=partial(clock.step, seconds)))
            for answer, other in zip(answers, wanted, strict=True):
                assert not isinstance(answer, BaseException), (service, answer)
                assert [one.token_ids for one in answer] == [one.token_ids for one in other], service
        running.until_serving()
        assert all_there(running), running.logs()[-20:]
        years = {line["timestamp"][:4] for line in running.logs() if line["service"] == "gateway"}
        assert len(years) > 1, "the clocks were not stepped"


def all_there(running: Troupe) -> bool:
    """Whether the newest scheduler knows a member of every service, both workers among them."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        load = running.load()
        if len(load.workers) == 2:
            return True
        time.sleep(0.2)
    return False
