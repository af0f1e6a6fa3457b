"""The supervisor against scripted processes and a clock of its own."""

from __future__ import annotations

import pytest

from services.cli.supervision.supervisor import (
    FIRST_DELAY,
    LEAVE,
    LOAD_SECONDS,
    LONG_LIFE,
    MAX_DELAY,
    READY_SECONDS,
    STOP,
    ChildProcess,
    OrderFailedError,
    Role,
    Supervisor,
    rolling_restart,
)
from shared.processes.exit_status import EXIT_CONFIG

GATEWAY, WORKER = Role("gateway"), Role("worker")
WORDS: dict[int, str] = {LEAVE: "ask", STOP: "terminate"}


class FakeProcess:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events
        self.status: int | None = None
        self.stubborn = False
        self.num_polls_to_die = 0  # once it is killed

    def poll(self) -> int | None:
        if self.status == -9 and self.num_polls_to_die > 0:
            self.num_polls_to_die -= 1
            return None
        return self.status

    def send_signal(self, number: int, /) -> None:
        self.events.append(f"{WORDS[number]} {self.name}")
        if not self.stubborn:
            self.status = 0

    def kill(self) -> None:
        self.events.append(f"kill {self.name}")
        self.status = -9


class Stage:
    """A supervisor whose time passes only when told to, or when it sleeps."""

    def __init__(self, *roles: Role) -> None:
        self.now = 100.0
        self.events: list[str] = []
        self.reports: list[str] = []
        self.started: list[FakeProcess] = []
        self.supervisor = Supervisor(
            roles, self.start, report=self.reports.append, clock=lambda: self.now, sleep=self.sleep
        )
        self.supervisor.start()

    def start(self, role: Role) -> FakeProcess:
        self.started.append(FakeProcess(role.name, self.events))
        return self.started[-1]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def after(self, seconds: float) -> int:
        """How many processes have been started once `seconds` have passed."""
        self.now += seconds
        self.supervisor.poll()
        return len(self.started)

    def die(self, status: int = 1) -> None:
        self.started[-1].status = status
        self.supervisor.poll()


def test_all_roles_start_at_once() -> None:
    stage = Stage(GATEWAY, WORKER, Role("worker", 1))
    assert [process.name for process in stage.started] == ["gateway-0", "worker-0", "worker-1"]


def test_the_dead_are_replaced_after_a_delay_that_doubles() -> None:
    stage = Stage(WORKER)
    delay = FIRST_DELAY
    for life in range(1, 10):
        stage.die()
        assert stage.after(delay - 0.01) == life
        assert stage.after(0.02) == life + 1
        delay = min(2 * delay, MAX_DELAY)
    assert delay == MAX_DELAY and len(stage.reports) == 9


def test_a_long_life_forgives() -> None:
    stage = Stage(WORKER)
    stage.die()
    stage.after(FIRST_DELAY)
    stage.now += LONG_LIFE
    stage.die()
    assert stage.after(FIRST_DELAY + 0.01) == 3


def test_a_bad_configuration_is_not_tried_again() -> None:
    stage = Stage(GATEWAY, WORKER)
    stage.die(EXIT_CONFIG)
    assert stage.supervisor.failure == (WORKER, EXIT_CONFIG)


def test_one_of_several_that_cannot_work_is_given_up_and_the_others_stay() -> None:
    """As a worker that was refused, since it does not compute what the others do."""
    stage = Stage(WORKER, GATEWAY)
    stage.supervisor.scale("worker", 2)
    stage.started[-1].status = EXIT_CONFIG
    stage.after(100.0)
    assert names(stage) == ["worker-0", "gateway-0"] and stage.supervisor.failure is None
    assert any("worker-1 cannot work beside the others" in line for line in stage.reports)
    assert len(stage.started) == 3, "it is not started again"
    stage.started[0].status = EXIT_CONFIG
    stage.after(0.0)
    assert stage.supervisor.failure == (WORKER, EXIT_CONFIG), "the last one"


def test_the_gateway_leaves_before_the_others() -> None:
    stage = Stage(WORKER, GATEWAY)
    stage.supervisor.stop(5)
    assert stage.events == ["terminate gateway-0", "terminate worker-0"]
    assert stage.now == 100.0


def test_who_does_not_leave_is_killed() -> None:
    stage = Stage(WORKER, GATEWAY)
    stage.started[0].stubborn = True
    stage.supervisor.stop(5)
    assert stage.events[-1] == "kill worker-0"
    assert 105 < stage.now < 110


def test_the_end_of_what_is_killed_is_waited_for() -> None:
    stage = Stage(WORKER, GATEWAY)
    (worker, _) = stage.started
    worker.stubborn, worker.num_polls_to_die = True, 5
    stage.supervisor.stop(5)
    assert worker.num_polls_to_die == 0 and worker.poll() == -9


def test_the_waiting_are_not_started_while_stopping() -> None:
    stage = Stage(WORKER)
    stage.die()
    stage.supervisor.stop(5)
    assert len(stage.started) == 1 and not stage.events


def names(stage: Stage) -> list[str]:
    return [child.role.name for child in stage.supervisor.children]


def test_scaling_starts_who_lacks_and_dismisses_the_last() -> None:
    stage = Stage(WORKER, GATEWAY)
    stage.supervisor.scale("worker", 3)
    assert names(stage) == ["worker-0", "gateway-0", "worker-1", "worker-2"]
    stage.supervisor.scale("worker", 1)
    assert stage.events == ["ask worker-1", "ask worker-2"]
    stage.after(0)
    assert names(stage) == ["worker-0", "gateway-0"] and not stage.reports
    stage.supervisor.scale("worker", 2)
    assert names(stage)[-1] == "worker-1"


def test_who_is_dismissed_and_does_not_leave_is_killed() -> None:
    stage = Stage(WORKER)
    stage.started[0].stubborn = True
    stage.supervisor.dismiss(stage.supervisor.children[0])
    stage.after(61.9)
    assert "kill worker-0" not in stage.events
    stage.after(0.2)
    stage.after(0)
    assert stage.events[-1] == "kill worker-0" and not stage.supervisor.children


def test_who_waits_for_a_restart_can_be_dismissed() -> None:
    stage = Stage(WORKER)
    stage.die()
    stage.supervisor.dismiss(stage.supervisor.children[0])
    stage.after(100)
    assert len(stage.started) == 1 and not stage.supervisor.children


class Restart:
    """A rolling restart on a stage where a process is ready some turns after its start."""

    def __init__(self, stage: Stage, *services: str, turns: int = 2) -> None:
        self.stage = stage
        self.turns = turns
        self.ages: dict[int, int] = {}
        self.work = rolling_restart(
            stage.supervisor, services, self.is_ready, report=stage.reports.append, clock=lambda: stage.now
        )

    def is_ready(self, child: ChildProcess) -> bool:
        age = self.ages[id(child.process)] = self.ages.get(id(child.process), 0) + 1
        return child.alive and age > self.turns

    def run(self, seconds: float = 0.1) -> None:
        for _ in self.work:
            self.stage.after(seconds)


def test_a_rolling_restart_replaces_each_and_lets_the_small_ones_overlap() -> None:
    stage = Stage(WORKER, Role("scheduler"), Role("tokenizer"), Role("tokenizer", 1), GATEWAY)
    before = list(stage.started)
    Restart(stage, "gateway", "worker", "scheduler", "tokenizer").run()
    assert stage.events == [f"ask {name}" for name in
                            ("tokenizer-0", "tokenizer-1", "worker-0", "scheduler-0", "gateway-0")]  # fmt: skip
    assert [process.name for process in stage.started[5:]] == [
        "tokenizer-0", "tokenizer-1", "worker-0", "scheduler-0", "gateway-0"
    ]  # fmt: skip
    assert sorted(names(stage)) == sorted(process.name for process in before)
    assert not any(child.process in before for child in stage.supervisor.children)


def test_a_successor_is_ready_before_its_predecessor_leaves() -> None:
    stage = Stage(Role("tokenizer"))
    restart = Restart(stage, "tokenizer", turns=5)
    for _ in range(5):
        next(restart.work)
        assert len(stage.started) == 2 and not stage.events
    restart.run()
    assert stage.events == ["ask tokenizer-0"]


def test_a_successor_that_is_never_ready_ends_the_restart_and_nobody_leaves() -> None:
    stage = Stage(Role("tokenizer"), GATEWAY)
    with pytest.raises(OrderFailedError, match="tokenizer-0"):
        Restart(stage, "tokenizer", "gateway", turns=10**6).run(seconds=10)
    assert stage.events == ["ask tokenizer-0"], "the successor"
    stage.after(0)
    assert stage.started[0].status is None and names(stage) == ["tokenizer-0", "gateway-0"]


def test_a_successor_that_cannot_work_ends_the_restart_at_once() -> None:
    """Status 78, as of a tokenizer whose files have changed: it is given up, and its predecessor stays."""
    stage = Stage(Role("tokenizer"), GATEWAY)
    restart = Restart(stage, "tokenizer", turns=10**6)
    next(restart.work)
    stage.die(EXIT_CONFIG)
    with pytest.raises(OrderFailedError, match="the next tokenizer-0 cannot work beside its predecessor"):
        next(restart.work)
    assert names(stage) == ["tokenizer-0", "gateway-0"] and stage.started[0].status is None
    assert stage.supervisor.failure is None and not stage.events


def test_a_model_has_its_time_to_load_from_when_its_predecessor_has_left() -> None:
    """A worker that takes a minute to leave, and whose successor takes several to load."""
    stage = Stage(WORKER)
    stage.started[0].stubborn = True
    Restart(stage, "worker", turns=50).run(seconds=10)
    assert stage.events == ["ask worker-0", "kill worker-0"] and len(stage.started) == 2
    assert stage.now - 100.0 > 61.9 + 490.0 and "worker-0 was replaced" in stage.reports[-1]


def test_a_model_that_is_not_loaded_in_time_ends_the_restart() -> None:
    stage = Stage(WORKER, Role("scheduler"))
    with pytest.raises(OrderFailedError, match=f"worker-0 was not ready within {LOAD_SECONDS:g} s"):
        Restart(stage, "worker", "scheduler", turns=10**6).run(seconds=10)
    assert stage.now - 100.0 > LOAD_SECONDS and stage.events == ["ask worker-0"], "the scheduler stays"
    with pytest.raises(OrderFailedError, match=f"scheduler-0 was not ready within {READY_SECONDS:g} s"):
        Restart(stage, "scheduler", turns=10**6).run(seconds=10)


def test_a_successor_that_is_given_up_ends_the_restart_at_once() -> None:
    """Status 78, as of a worker that does not compute what the others do: nothing is waited for."""
    stage = Stage(WORKER, Role("worker", 1))
    restart = Restart(stage, "worker", turns=10**6)
    next(restart.work)
    stage.after(0)
    next(restart.work)
    stage.die(EXIT_CONFIG)
    with pytest.raises(OrderFailedError, match="the next worker-0 cannot work, and is given up"):
        next(restart.work)
    assert names(stage) == ["worker-1"] and stage.supervisor.failure is None


def test_a_predecessor_that_is_given_up_is_replaced_all_the_same() -> None:
    stage = Stage(Role("tokenizer"), GATEWAY)
    restart = Restart(stage, "tokenizer", turns=1)
    next(restart.work)
    stage.started[0].status = EXIT_CONFIG
    stage.supervisor.poll()
    restart.run()
    assert sorted(names(stage)) == ["gateway-0", "tokenizer-0"] and stage.supervisor.children[-1].alive


def test_a_process_that_cannot_be_started_now_is_started_later() -> None:
    """No memory, no descriptor, a full disk: that passes, and the others live."""
    stage = Stage(WORKER)
    stage.die()
    really, stage.supervisor._start = stage.start, no_memory
    assert stage.after(FIRST_DELAY) == 1
    assert "cannot be started" in stage.reports[-1] and "allocate" in stage.reports[-1]
    stage.supervisor._start = really
    assert stage.after(FIRST_DELAY) == 1, "it waits a while"
    assert stage.after(MAX_DELAY) == 2
    assert stage.supervisor.children[0].alive


def no_memory(role: Role) -> FakeProcess:
    raise OSError(12, "Cannot allocate memory")
