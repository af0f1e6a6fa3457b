"""The supervisor against scripted processes and a clock of its own."""

from __future__ import annotations

from services.cli.supervisor import EXIT_CONFIG, FIRST_DELAY, LONG_LIFE, MAX_DELAY, Role, Supervisor

GATEWAY, WORKER = Role("gateway"), Role("worker")


class FakeProcess:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events
        self.status: int | None = None
        self.stubborn = False

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        self.events.append(f"terminate {self.name}")
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


def test_the_waiting_are_not_started_while_stopping() -> None:
    stage = Stage(WORKER)
    stage.die()
    stage.supervisor.stop(5)
    assert len(stage.started) == 1 and not stage.events
