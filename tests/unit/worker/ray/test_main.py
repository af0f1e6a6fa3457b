"""What stands between `pageant serve` and a group on Ray: waiting for a place, signals, the status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.ray import __main__ as program
from services.worker.ray.cluster import connect
from services.worker.ray.group import RankMember
from services.worker.ray.placed import RankReport
from shared.actor.status import read_status, waits_path
from shared.config import Settings
from shared.errors import ConfigError
from shared.processes.exit_status import EXIT_FATAL
from shared.ranks.ray import NEEDS_RAY, has_ray

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture
def orders() -> Iterator[program.Orders]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield program.Orders()
    for number, handler in before.items():
        signal.signal(number, handler)


class PlayedPlaces:
    def __init__(self, turns: int, orders: program.Orders | None = None) -> None:
        self._turns = turns
        self._orders = orders

    def are_there(self) -> bool:
        self._turns -= 1
        if self._orders is not None and self._turns == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return self._turns < 0

    def lack(self) -> str:
        return "it needs 1 GPU"


def test_what_is_missing_is_said_while_it_is(
    tmp_path: Path, orders: program.Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "FIRST_WORD", 0.0)
    settings = Settings.of(status_file=str(tmp_path / "status")).deployment
    said = waits_path(tmp_path / "status")
    places: Any = PlayedPlaces(3)
    seen: list[str] = []
    look = places.are_there

    def are_there() -> bool:
        seen.append(said.read_text() if said.exists() else "")
        return bool(look())

    places.are_there = are_there
    assert program.wait_for(places, settings, orders)
    assert seen == ["", "it needs 1 GPU", "it needs 1 GPU", "it needs 1 GPU"]
    assert not said.exists()


def test_a_group_that_is_not_wanted_any_more_waits_for_no_place(tmp_path: Path, orders: program.Orders) -> None:
    places: Any = PlayedPlaces(2, orders)
    assert not program.wait_for(places, Settings.of(status_file=str(tmp_path / "status")).deployment, orders)


class PlayedGroup:
    """Ends once it was asked to leave."""

    def __init__(self, turns: list[str]) -> None:
        self.leader = RankMember(0, None)
        self.signals: list[int] = []
        self._turns = turns

    def look(self) -> bool:
        if not self._turns:
            return False
        self.leader.report = RankReport(None, self._turns.pop(0), "")
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def verdict(self) -> tuple[int, str]:
        return 0, ""


def test_the_leaders_status_is_that_of_the_process_and_each_signal_reaches_it_once(
    tmp_path: Path, orders: program.Orders
) -> None:
    settings = Settings.of(status_file=str(tmp_path / "status")).deployment
    group: Any = PlayedGroup(["", "READY", "DRAINING"])
    assert program.watch(group, settings, orders) == (0, "")
    assert read_status(tmp_path / "status") == "DRAINING"
    assert group.signals == [signal.SIGTERM]


@pytest.mark.skipif(has_ray(), reason="needs an environment without the package ray")
def test_without_ray_it_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"^executor=ray needs the package ray"):
        connect(Settings.of(executor="ray"))
    done = subprocess.run(
        [sys.executable, "-m", "services.worker.ray.host"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (78, f"{NEEDS_RAY}\n")


@pytest.mark.skipif(not has_ray(), reason="needs the package ray (pip install 'pageant[ray]')")
def test_an_address_where_nothing_listens_is_named_at_once() -> None:
    environment = {**os.environ, "PAGEANT_EXECUTOR": "ray", "PAGEANT_RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-m", "services.worker.ray.host"],
        capture_output=True, text=True, env=environment, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_FATAL
    assert done.stderr.splitlines()[-1].startswith("no Ray cluster answers at 127.0.0.1:1 (ray_address): ")
