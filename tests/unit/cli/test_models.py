"""The keeper of models and the orders about them, against processes that do as they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.cli.models.fleet import Fleet, ModelSettings
from services.cli.models.keeper import LEAST_TURN, Wakefulness
from services.cli.supervision.supervisor import LOAD_SECONDS, ChildProcess, OrderFailedError, Role, Supervisor
from shared.activity import Activity, is_marked_asleep, write_activity
from shared.config import FurtherModel, Settings, read_models
from shared.processes.exit_status import EXIT_CONFIG
from shared.processes.supervision import ModelOrder
from tests.unit.cli.supervision.test_supervisor import FakeProcess

AWAKE, ASLEEP, LEAVING = Wakefulness.AWAKE, Wakefulness.ASLEEP, Wakefulness.LEAVING
CAST = [Role("worker"), Role("scheduler"), Role("tokenizer"), Role("detokenizer"), Role("gateway")]


class Serving:
    """A first model `a`, further ones, and schedulers that say what a test lets them say."""

    def __init__(self, directory: Path, *models: str, **settings: Any) -> None:
        values = {"model": "m", "served_model_name": "a,alpha", "runtime_dir": str(directory), **settings}
        self.now = 100.0
        self.events: list[str] = []
        self.reports: list[str] = []
        self.settings = ModelSettings(Settings.of(**values))
        self.supervisor = Supervisor(CAST, self.start, report=self.reports.append, clock=lambda: self.now)
        self.unable: set[str] = set()  # names of roles that end as soon as they begin
        self.slow: set[str] = set()  # of those that never become ready
        self.waiting: set[str] = set()  # of those that wait for a place
        self.requests: dict[str, int] = {}
        self.fleet = Fleet(
            self.settings,
            self.supervisor,
            self,
            report=self.reports.append,
            clock=lambda: self.now,
        )
        self.fleet.begin({"worker": 1, "draft": 0}, [FurtherModel(name=name, model="m") for name in models])
        self.supervisor.start()
        self.turn()

    def is_ready(self, child: ChildProcess) -> bool:
        return child.alive and child.role.name not in self.slow | self.waiting

    def waits_for(self, child: ChildProcess) -> str:
        return "it needs 1 GPU" if child.role.name in self.waiting else ""

    def last_words(self, role: Role) -> str:
        return f"{role.service} fell over"

    def start(self, role: Role) -> FakeProcess:
        process = FakeProcess(role.name, self.events)
        process.status = EXIT_CONFIG if role.name in self.unable else None
        return process

    def turn(self, seconds: float = 0.1, times: int = 4) -> None:
        """Time passes, schedulers report, and everything that follows happens."""
        for _ in range(times):
            self.now += seconds / times
            for name, model in self.fleet.keeper.models.items():
                workers = [c for c in self.supervisor.cast("worker", name) if c.alive]
                said = Activity(
                    num_requests=self.requests.get(name, 0),
                    num_gateways=1,
                    num_workers=len(workers),
                    is_asleep=is_marked_asleep(model.directory),
                )
                write_activity(model.directory, said)
            self.fleet.poll()
            self.supervisor.poll()

    def order(self, **values: Any) -> list[str]:
        said: list[str] = []
        for _ in self.fleet.carry_out(ModelOrder(**values), said.append):
            self.turn()
        return said

    def states(self) -> dict[str, Wakefulness]:
        return {model.label: model.state for model in self.fleet.keeper.models.values()}

    def workers(self, name: str = "") -> int:
        return len(self.supervisor.cast("worker", name))


def test_an_idle_model_sleeps_and_a_request_wakes_it(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "b", sleep_after=10.0)
    serving.requests["b"] = 1
    serving.turn(11.0)
    serving.turn()
    assert serving.states() == {"a": ASLEEP, "b": AWAKE} and serving.workers() == 0 and serving.workers("b") == 1
    assert [role.service for role in (c.role for c in serving.supervisor.children) if not role.model] == [
        "scheduler", "tokenizer", "detokenizer", "gateway"
    ]  # fmt: skip
    serving.requests[""] = 2
    serving.turn()
    assert serving.states()["a"] is AWAKE and serving.workers() == 1
    assert not is_marked_asleep(serving.settings.activity_dir(""))


def test_workers_stay_until_the_scheduler_knows_of_the_sleep(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.fleet.keeper.sleep("", 5.0)
    serving.fleet.poll()
    assert serving.states() == {"a": LEAVING} and "ask worker-0" not in serving.events
    serving.requests[""] = 3
    serving.turn(1.0)
    assert "ask worker-0" not in serving.events, "its requests have five seconds to end"
    serving.turn(5.0)
    assert serving.events == ["ask worker-0"]


def test_where_one_has_room_they_take_turns(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "b", max_awake_models=1, model_turn=20.0)
    assert serving.states() == {"a": AWAKE, "b": ASLEEP}, "the second begins without its workers"
    serving.requests = {"": 1, "b": 1}
    serving.turn(10.0)
    assert serving.states()["a"] is AWAKE, "it has work, and its turn is not over"
    serving.turn(15.0)
    serving.turn()
    assert serving.states() == {"a": ASLEEP, "b": AWAKE} and serving.workers() + serving.workers("b") == 1
    del serving.requests["b"]
    serving.turn(2 * LEAST_TURN)
    serving.turn()
    assert serving.states() == {"a": AWAKE, "b": ASLEEP}, "one that is idle makes room at once"


def test_a_swap_by_order_and_a_pinned_model(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "b", pinned=True, max_awake_models=2)
    with pytest.raises(OrderFailedError, match=r"^model a is pinned$"):
        serving.order(action="swap", name="b", out=["alpha"])
    with pytest.raises(OrderFailedError, match=r"^there is no model 'x'; there are: a, b$"):
        serving.order(action="swap", name="x")
    with pytest.raises(OrderFailedError, match="cannot both stay and leave"):
        serving.order(action="swap", name="b", out=["b"])
    assert "in memory" in serving.order(action="swap", name="a")[-1]
    assert serving.states() == {"a": AWAKE, "b": ASLEEP}
    serving.order(action="swap", name="b")
    assert serving.states() == {"a": AWAKE, "b": AWAKE}
    assert [line.split()[:2] for line in serving.order(action="list")[1:]] == [["a", "awake,"], ["b", "awake"]]


def test_models_come_and_go(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    new = FurtherModel(name="org/new", model="m", aliases=["n"], workers=2)
    assert "was added" in serving.order(action="add", model=new)[-1]
    file = Path(serving.settings.of(Role("gateway")).models.models_file)
    assert read_models(file) == [new] and serving.workers("org/new") == 2
    own = serving.settings.of(Role("scheduler", 0, "org/new"))
    assert own.models.activity_dir != serving.settings.of(Role("scheduler")).models.activity_dir
    for taken in ({"name": "org/new"}, {"name": "c", "aliases": ["n"]}, {"name": "c", "aliases": ["alpha"]}):
        with pytest.raises(OrderFailedError, match=r"already$|is taken by"):
            serving.order(action="add", model=FurtherModel(model="m", **taken))
    with pytest.raises(OrderFailedError, match="first model, which cannot be removed"):
        serving.order(action="remove", name="a")
    assert "was removed" in serving.order(action="remove", name="n", seconds=0.0)[-1]
    assert not read_models(file) and not [c for c in serving.supervisor.children if c.role.model]


def test_a_model_that_cannot_be_loaded_ends_no_other(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "b")
    serving.unable = {"c/worker-0", "b/worker-0"}
    with pytest.raises(OrderFailedError, match=r"^model c: worker: worker fell over$"):
        serving.order(action="add", model=FurtherModel(name="c", model="m"))
    assert serving.states() == {"a": AWAKE, "b": AWAKE} and "c" not in serving.settings.served
    serving.order(action="swap", name="a")
    with pytest.raises(OrderFailedError, match=r"^model b"):
        serving.order(action="swap", name="b", out=[])
    serving.turn()
    assert serving.states()["b"] is Wakefulness.FAILED and serving.supervisor.failure is None
    serving.unable, serving.slow = set(), {"b/worker-0"}
    serving.fleet.keeper.wake("b")
    serving.turn(2 * LOAD_SECONDS)
    assert serving.states()["b"] is Wakefulness.FAILED and not serving.workers("b"), "it was given time"
    assert not is_marked_asleep(serving.settings.activity_dir("b")), "its requests are refused"
    serving.slow = set()
    serving.order(action="swap", name="b", out=[])
    assert serving.states() == {"a": AWAKE, "b": AWAKE}, "an order tries again"


def long_in_waking(serving: Serving, name: str) -> None:
    """As where nobody has looked since its start, which took longer than a model has to be loaded."""
    model = serving.fleet.keeper.models[name]
    model.state, model.since = Wakefulness.WAKING, serving.now - 2 * LOAD_SECONDS


@pytest.mark.parametrize("name", ["", "b"])
def test_what_is_ready_serves_however_long_it_took(tmp_path: Path, name: str) -> None:
    serving = Serving(tmp_path, "b")
    long_in_waking(serving, name)
    serving.turn()
    assert serving.states() == {"a": AWAKE, "b": AWAKE} and not serving.events
    serving.supervisor.scale("worker", 2, name)
    serving.slow = {child.role.name for child in serving.supervisor.cast("worker", name)[1:]}
    long_in_waking(serving, name)
    serving.turn()
    assert serving.states() == {"a": AWAKE, "b": AWAKE} and not serving.events, "those that are ready begin"


@pytest.mark.parametrize("name", ["", "b"])
def test_a_worker_that_waits_for_a_place_is_not_late(tmp_path: Path, name: str) -> None:
    serving = Serving(tmp_path, "b")
    label = name or "a"
    serving.supervisor.scale("worker", 2, name)
    both = [child.role.name for child in serving.supervisor.cast("worker", name)]
    serving.waiting = set(both)
    long_in_waking(serving, name)
    serving.turn(2 * LOAD_SECONDS)
    assert serving.states()[label] is Wakefulness.WAKING and not serving.events, "there may be a place later"
    serving.waiting = {both[1]}
    serving.turn()
    assert serving.states()[label] is AWAKE and not serving.events, "the first one does not wait for the second"
    assert serving.workers(name) == 2


def test_the_first_model_loads_as_long_as_no_other_wants_its_place(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "b", max_awake_models=1)
    serving.slow = {"worker-0"}
    long_in_waking(serving, "")
    serving.turn(2 * LOAD_SECONDS)
    assert serving.states() == {"a": Wakefulness.WAKING, "b": ASLEEP} and not serving.events
    serving.requests["b"] = 1
    serving.turn()
    assert serving.states() == {"a": Wakefulness.FAILED, "b": AWAKE} and serving.events == ["ask worker-0"]


def test_a_full_disk_fails_an_order_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    serving = Serving(tmp_path, "b")
    with monkeypatch.context() as patch:
        patch.setattr("services.cli.models.fleet.write_models", full)
        for order in ({"action": "add", "model": FurtherModel(name="c", model="m")}, {"action": "remove", "name": "b"}):
            with pytest.raises(OrderFailedError, match="No space left"):
                serving.order(**order)
    with monkeypatch.context() as patch:
        patch.setattr(serving.fleet.keeper, "poll", full)
        serving.turn(times=3)
    serving.turn()
    assert [line for line in serving.reports if "No space" in line] == [
        "models cannot be put to sleep or woken: [Errno 28] No space left on device"
    ]
    assert serving.states() == {"a": AWAKE, "b": AWAKE} and serving.supervisor.failure is None
    assert not [child for child in serving.supervisor.children if child.role.model == "c"]
    serving.order(action="remove", name="b")
    assert serving.states() == {"a": AWAKE}
