"""Orders over a real socket to a desk that is polled, as `pageant serve` does it."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.cli.supervision.orders import MAX_ORDERS, ORDER_SECONDS, SCALE_SECONDS, Fulfilment, OrderDesk, send_order
from services.cli.supervision.supervisor import Role, Supervisor
from shared.processes.supervision import ACCEPTED, BUSY, SupervisionReport, SupervisorOrder, desk_path
from tests.unit.cli.supervision.test_supervisor import FakeProcess
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


def test_a_service_that_these_settings_cannot_have_is_not_started(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.work.unable = {"draft": "there is none"}
        assert give(deployment.path, SupervisorOrder(scale={"worker": 2, "draft": 1})) == (
            False, ["draft=1: there is none"]
        )  # fmt: skip
        assert len(deployment.supervisor.children) == 3, "nothing of that order was begun"
        assert give(deployment.path, SupervisorOrder(scale={"draft": 0})) == (True, ["done"])


def test_a_client_that_orders_nothing_holds_up_no_other(tmp_path: Path) -> None:
    now = 100.0
    desk = OrderDesk(desk_path(tmp_path), clock=lambda: now)
    silent, second = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    silent.connect(str(desk_path(tmp_path)))
    second.connect(str(desk_path(tmp_path)))
    second.sendall(b'{"restart": ["worker"]}\n')
    assert desk.poll() == SupervisorOrder(restart=["worker"])
    now += ORDER_SECONDS + 1
    assert desk.poll() is None
    assert silent.recv(1) == b""
    desk.close()
    silent.close()
    second.close()


def test_a_question_is_answered_while_an_order_is_in_hand_and_further_orders_wait_in_turn(tmp_path: Path) -> None:
    now = 100.0
    events: list[str] = []
    ready: set[str] = {"worker-0"}
    supervisor = Supervisor([Role("worker")], lambda role: FakeProcess(role.name, events), report=lambda _: None)
    supervisor.start()
    desk = OrderDesk(desk_path(tmp_path))
    work = Fulfilment(desk, supervisor, lambda child: child.role.name in ready, report=events.append, clock=lambda: now)

    def say(order: SupervisorOrder) -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(desk_path(tmp_path)))
            client.sendall(msgspec.json.encode(order) + b"\n")
            work.poll()
            return client.recv(65536).decode().strip()

    def report() -> SupervisionReport:
        return msgspec.json.decode(say(SupervisorOrder(report=True)), type=SupervisionReport)

    assert [(one.service, one.index, one.state) for one in report().processes] == [("worker", 0, "ready")]
    assert say(SupervisorOrder(scale={"worker": 2}, wait=False)) == ACCEPTED
    assert (report().order, [one.state for one in report().processes]) == ("scale worker=2", ["ready", "starting"])
    assert "no service" in say(SupervisorOrder(restart=["prompter"], wait=False))
    for _ in range(MAX_ORDERS):
        assert say(SupervisorOrder(scale={"worker": 1}, wait=False)) == ACCEPTED
    assert say(SupervisorOrder(restart=["worker"], wait=False)).startswith(BUSY)
    now += SCALE_SECONDS + 1
    assert "not done within" in report().failed + events[-1], "an order that cannot be carried out makes way"
    for _ in range(MAX_ORDERS + 1):
        supervisor.poll()
        work.poll()
    found = report()
    assert (found.order, found.num_waiting, found.failed, len(found.processes)) == ("", 0, "", 1)
    assert events[-1] == "ask worker-1", "the last replica is the one that leaves"
    desk.close()


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
