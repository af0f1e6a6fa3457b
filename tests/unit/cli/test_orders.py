"""Orders over a real socket to a desk that is polled, as `pageant serve` does it."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from services.cli.orders import Fulfilment, Order, OrderDesk, desk_path, send_order
from services.cli.supervisor import Role, Supervisor
from tests.unit.cli.test_supervisor import FakeProcess


class Deployment:
    """A supervisor of fake processes, and a thread that polls it and its desk."""

    def __init__(self, directory: Path) -> None:
        self.path = desk_path(directory)
        self.events: list[str] = []
        cast = [Role("worker"), Role("scheduler"), Role("gateway")]
        self.supervisor = Supervisor(cast, lambda role: FakeProcess(role.name, self.events), report=lambda _: None)
        self.supervisor.start()
        self.desk = OrderDesk(self.path)
        self.work = Fulfilment(self.desk, self.supervisor, lambda child: child.alive, report=lambda _: None)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._loop)
        self.thread.start()

    def _loop(self) -> None:
        while not self.over.is_set():
            self.supervisor.poll()
            self.work.poll()
            time.sleep(0.002)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()
        self.desk.close()
        assert not self.path.exists()


def give(path: Path, order: Order) -> tuple[bool, list[str]]:
    said: list[str] = []
    return send_order(path, order, said.append), said


def test_an_order_is_carried_out_and_its_giver_is_told(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        well, said = give(deployment.path, Order(restart=["scheduler", "worker"]))
        assert well and [line.split()[0] for line in said] == ["worker-0", "scheduler-0", "done"]
        assert deployment.events == ["ask worker-0", "ask scheduler-0"]
        assert give(deployment.path, Order(scale={"worker": 3})) == (True, ["done"])
        assert len(deployment.supervisor.cast("worker")) == 3
        assert give(deployment.path, Order(scale={"worker": 1})) == (True, ["done"])
        assert len(deployment.supervisor.children) == 3


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (Order(restart=["prompter"]), "there is no service 'prompter'"),
        (Order(scale={"scheduler": 2}), "at most 1"),
        (Order(scale={"worker": 0}), "at least 1"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(tmp_path: Path, order: Order, words: str) -> None:
    with Deployment(tmp_path) as deployment:
        well, said = give(deployment.path, order)
        assert not well and words in said[-1] and not deployment.events


def test_who_talks_nonsense_or_leaves_is_forgotten(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        for line in (b"restart!\n", b"x" * 10_000, b"", b'{"restart": ["worker"]'):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(deployment.path))
                client.sendall(line)
        assert give(deployment.path, Order(scale={"draft": 1})) == (True, ["done"])
    with pytest.raises(OSError):
        give(deployment.path, Order())
