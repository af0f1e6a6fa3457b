"""Orders over a real socket to a desk that is polled, as `pageant serve` does it."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from services.cli.orders import ORDER_SECONDS, Fulfilment, OrderDesk, SupervisorOrder, desk_path, send_order
from services.cli.supervisor import Role, Supervisor
from tests.unit.cli.test_supervisor import FakeProcess
from tests.unit.test_descriptors import full_table


class Deployment:
    """A supervisor of fake processes, and a thread that polls it and its desk."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
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


def give(path: Path, order: SupervisorOrder) -> tuple[bool, list[str]]:
    said: list[str] = []
    return send_order(path, order, said.append), said


def test_an_order_is_carried_out_and_its_giver_is_told(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        well, said = give(deployment.path, SupervisorOrder(restart=["scheduler", "worker"]))
        assert well and [line.split()[0] for line in said] == ["worker-0", "scheduler-0", "done"]
        assert deployment.events == ["ask worker-0", "ask scheduler-0"]
        assert give(deployment.path, SupervisorOrder(scale={"worker": 3})) == (True, ["done"])
        assert len(deployment.supervisor.cast("worker")) == 3
        assert give(deployment.path, SupervisorOrder(scale={"worker": 1})) == (True, ["done"])
        assert len(deployment.supervisor.children) == 3


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (SupervisorOrder(restart=["prompter"]), "there is no service 'prompter'"),
        (SupervisorOrder(scale={"scheduler": 2}), "at most 1"),
        (SupervisorOrder(scale={"worker": 0}), "at least 1"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(tmp_path: Path, order: SupervisorOrder, words: str) -> None:
    with Deployment(tmp_path) as deployment:
        well, said = give(deployment.path, order)
        assert not well and words in said[-1] and not deployment.events


def test_who_talks_nonsense_or_leaves_is_forgotten(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        for line in (b"restart!\n", b"x" * 10_000, b"", b'{"restart": ["worker"]'):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(deployment.path))
                client.sendall(line)
        assert give(deployment.path, SupervisorOrder(scale={"draft": 1})) == (True, ["done"])
    with pytest.raises(OSError):
        give(deployment.path, SupervisorOrder())


def test_a_client_that_orders_nothing_makes_way_for_the_next(tmp_path: Path) -> None:
    now = 100.0
    desk = OrderDesk(desk_path(tmp_path), clock=lambda: now)
    silent, second = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    silent.connect(str(desk_path(tmp_path)))
    second.connect(str(desk_path(tmp_path)))
    second.sendall(b'{"restart": ["worker"]}\n')
    assert desk.poll() is None
    now += ORDER_SECONDS + 1
    assert desk.poll() is None
    assert silent.recv(1) == b""
    assert desk.poll() == SupervisorOrder(restart=["worker"])
    desk.close()
    silent.close()
    second.close()


def test_without_a_descriptor_a_desk_goes_on(tmp_path: Path) -> None:
    desk = OrderDesk(desk_path(tmp_path))
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(desk_path(tmp_path)))
    client.sendall(b'{"restart": ["worker"]}\n')
    with full_table():
        assert desk.poll() is None
    assert desk.poll() == SupervisorOrder(restart=["worker"])
    desk.close()
    client.close()


def test_a_desk_whose_directory_was_deleted_takes_orders_again(tmp_path: Path) -> None:
    with Deployment(tmp_path / "run") as deployment:
        shutil.rmtree(tmp_path / "run")
        deadline = time.monotonic() + 20
        while not deployment.path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert give(deployment.path, SupervisorOrder(scale={"worker": 2})) == (True, ["done"])


def test_a_desk_leaves_another_s_alone(tmp_path: Path) -> None:
    first = OrderDesk(desk_path(tmp_path))
    desk_path(tmp_path).unlink()
    second = OrderDesk(desk_path(tmp_path))
    assert "another pageant serve" in first.keep()
    assert first.keep() == "", "it is said once"
    first.close()
    assert second.keep() == "" and desk_path(tmp_path).exists()
    second.close()
    (tmp_path / "file").write_text("")
    third = OrderDesk(desk_path(tmp_path))
    third._path = tmp_path / "file" / "serve.sock"
    assert "no orders can be taken" in third.keep()
    assert third.keep() == ""
    third.close()
