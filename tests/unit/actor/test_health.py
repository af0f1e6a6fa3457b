"""Health by progress: stalled when work waits and nothing goes on, never when busy or idle; what is kept of it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.main import make as make_scheduler
from shared.actor import MemberActor
from shared.actor.actor import Handlers
from shared.actor.incident import Incidents
from shared.actor.process import log_fatal
from shared.actor.status import read_status
from shared.actor.watchdog import Watchdog
from shared.config import Settings
from shared.errors import ConfigError, FatalError
from shared.messages import DetokenizerInbox, Refused, Roster, ServiceName, Tick, TokenBatch
from shared.processes.exit_status import EXIT_CONFIG, EXIT_FATAL
from shared.processes.losses import INCIDENT, STATUS, losses
from shared.transport import MemoryTransport

ROOT = Path(__file__).resolve().parents[3]
QUICK = Settings.of(heartbeat_interval=0.02, heartbeat_timeout=0.2, stall_timeout=0.1)


class Loop:
    """An actor as its watchdog sees it."""

    def __init__(self) -> None:
        self.progress = 0
        self.is_over = False


def watch(loop: Loop, timeout: float = 5.0) -> tuple[Watchdog, list[str]]:
    said: list[str] = []
    dog = Watchdog(loop, timeout, on_stall=lambda: said.append("stalled"), on_recovery=lambda: said.append("recovered"))
    return dog, said


def test_a_loop_that_stands_still_is_stalled_once_and_recovers() -> None:
    loop, start = Loop(), time.monotonic()
    dog, said = watch(loop)
    loop.progress = 1
    for second in range(20):
        dog.look(start + second)
    assert said == ["stalled"]
    loop.progress = 2
    dog.look(start + 20)
    assert said == ["stalled", "recovered"]


def test_busy_idle_loading_frozen_and_leaving_loops_are_not_stalled() -> None:
    start = time.monotonic()
    busy, loading, frozen, over = Loop(), Loop(), Loop(), Loop()
    dogs = [(loop, *watch(loop)) for loop in (busy, loading, frozen, over)]
    frozen.progress = over.progress = 1
    over.is_over = True
    for second in range(60):
        busy.progress += 1  # an idle loop has its timers
        for loop, dog, _ in dogs:
            dog.look(start + (100 * second if loop is frozen else second))
    assert not any(said for _, _, said in dogs)


async def test_the_watchdog_sees_a_handler_that_does_not_return(tmp_path: Path) -> None:
    loop = Loop()
    stalled: list[float] = []
    dog = Watchdog(loop, 0.2, on_stall=lambda: stalled.append(time.monotonic()), on_recovery=lambda: None)
    loop.progress = 1
    dog.start()
    begun = time.monotonic()
    while not stalled and time.monotonic() - begun < 5:  # the event loop itself is held up here
        time.sleep(0.01)
    dog.stop()
    assert stalled


class Stuck(MemberActor):
    """Says that work waits when it is told to."""

    service = ServiceName.DETOKENIZER
    inbox_union = DetokenizerInbox
    reason = ""

    def handlers(self) -> Handlers:
        return {
            TokenBatch: lambda _: None,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    def stall(self) -> str:
        return self.reason


async def test_at_each_tick_a_service_looks_whether_its_place_is_still_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost() -> str:
        raise PermissionError("nothing can be made there")

    def taken() -> str:
        raise ConfigError("another has it")

    network = MemoryTransport()
    actor = Stuck(network, QUICK)
    monkeypatch.setattr(network, "keep", lambda: "its socket")
    actor.handle_tick(Tick())
    assert "runtime_dir_renewed" in capsys.readouterr().out
    monkeypatch.setattr(network, "keep", lost)
    for _ in range(3):
        actor.handle_tick(Tick())
    assert capsys.readouterr().out.count("runtime_dir_lost") == 1, "not at every tick"
    monkeypatch.setattr(network, "keep", taken)
    with pytest.raises(ConfigError, match="another has it"):
        actor.handle_tick(Tick())


class Listener(Stuck):
    """Notes what rosters say of stalls."""

    def __init__(self, network: MemoryTransport) -> None:
        super().__init__(network, QUICK)
        self.told: list[str] = []

    def handle_roster(self, roster: Roster) -> None:
        self.told.append(roster.stalled)
        super().handle_roster(roster)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_stall_is_in_the_status_file_the_roster_and_an_incident(tmp_path: Path) -> None:
    network = MemoryTransport()
    settings = QUICK.replace(status_file=str(tmp_path / "status"), incident_dir=str(tmp_path / "kept"))
    scheduler, member, other = make_scheduler(network, QUICK), Stuck(network, settings), Listener(network)
    member.incidents = Incidents(settings, member.service, member.instance, member.snapshot)
    tasks = [asyncio.create_task(actor.run()) for actor in (scheduler, member, other)]
    status, told = tmp_path / "status", other.told
    await until(lambda: read_status(status) == "READY")
    member.reason = "nothing comes"
    await until(lambda: read_status(status) == "STALLED")
    await until(lambda: told and told[-1] == f"{member.instance}: nothing comes")
    member.reason = ""
    await until(lambda: read_status(status) == "READY" and told[-1] == "")
    member.incidents.drain(30)
    (kept,) = (tmp_path / "kept").iterdir()
    bundle = json.loads(kept.read_bytes())
    assert bundle["cause"] == "nothing comes"
    assert bundle["state"]["phase"] == "READY"
    assert any("say_status" in line for lines in bundle["stacks"].values() for line in lines)
    for actor in (member, other, scheduler):
        actor.request_drain()
    await asyncio.gather(*tasks)


def incidents(directory: Path, **settings: Any) -> Incidents:
    chosen = Settings.of(incident_dir=str(directory / "kept"), api_keys="acme:very-secret-key", **settings)
    return Incidents(chosen, "worker", "worker-1", lambda: {"rows": 3})


def test_incidents_are_private_few_and_tell_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.actor.incident.QUIET_SECONDS", 0.0)
    kept = incidents(tmp_path, max_incidents=3)
    try:
        raise ValueError("once upon a time")  # as a library would quote what it failed at
    except ValueError as cause:
        error = FatalError("a step failed")
        error.__cause__ = cause
    for index in range(7):
        assert kept.write(f"cause {index}", error)
        kept.drain(30)
    left = sorted((tmp_path / "kept").iterdir())
    assert [json.loads(path.read_bytes())["cause"] for path in left] == ["cause 4", "cause 5", "cause 6"]
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in left)
    text = left[-1].read_text()
    assert (
        "very-secret-key" not in text
        and "once upon a time" not in text.replace("raise ValueError", "", 1).split('"stack"')[0]
    )
    told = json.loads(text)["error"]
    assert (told["type"], told["words"], told["cause"]["type"], told["cause"]["words"]) == (
        "FatalError", "a step failed", "ValueError", "",
    )  # fmt: skip
    assert json.loads(text)["state"] == {"rows": 3}


def test_one_incident_after_the_other_is_one(tmp_path: Path) -> None:
    kept = incidents(tmp_path)
    assert kept.write("first") is not None
    assert kept.write("second") is None
    kept.drain(30)


def test_an_incident_that_cannot_be_written_makes_nothing_worse(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file where the directory should be")
    before, spoilt = losses(), incidents(tmp_path)
    spoilt.write("cause")
    spoilt.drain(30)
    assert losses()[INCIDENT] == before[INCIDENT] + 1

    def lost() -> dict[str, Any]:
        raise RuntimeError("dictionary changed size")

    kept = Incidents(Settings.of(incident_dir=str(tmp_path / "other")), "worker", "w", lost)
    path = kept.write("cause")
    kept.drain(30)
    assert path is not None and json.loads(path.read_bytes())["state"] == {"lost": "RuntimeError"}


def test_a_disk_that_hangs_costs_incidents_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.actor.incident.QUIET_SECONDS", 0.0)
    freed, before, kept = threading.Event(), losses(), incidents(tmp_path)
    monkeypatch.setattr(kept, "_save", lambda *_: freed.wait(30))
    assert kept.write("first") is not None
    assert kept.write("second") is None
    assert losses()[INCIDENT] == before[INCIDENT] + 1
    freed.set()
    kept.drain(30)


async def test_a_status_file_that_cannot_be_written_ends_nobody(tmp_path: Path) -> None:
    """A directory that is not there, as after a cleaner of temporary files; then it is there again."""
    network, status = MemoryTransport(), tmp_path / "gone" / "status"
    scheduler = make_scheduler(network, QUICK.replace(status_file=str(status)))
    before, running = losses(), asyncio.create_task(scheduler.run())
    await until(lambda: losses()[STATUS] > before[STATUS] + 2)
    status.parent.mkdir()
    await until(lambda: read_status(status) == "READY")
    scheduler.request_drain()
    await running


@pytest.mark.parametrize(
    ("error", "status"),
    [(FatalError("broken"), EXIT_FATAL), (ZeroDivisionError("?"), EXIT_FATAL), (ConfigError("no"), EXIT_CONFIG)],
)
def test_nobody_dies_with_status_zero(error: Exception, status: int, tmp_path: Path) -> None:
    assert log_fatal([error], incidents(tmp_path)) == status
    assert (tmp_path / "kept").exists() == (status == EXIT_FATAL)


PROGRAM = """
import sys
from services.detokenizer import actor
from services.detokenizer.main import make
from shared.actor import run_actor
def fail(self, batch):
    raise ZeroDivisionError("of the test")
def stick(self, tick):
    import time
    if self.progress > 20:
        time.sleep(3)
    type(self).__mro__[1].handle_tick(self, tick)
if sys.argv[1] == "die":
    actor.DetokenizerActor.on_tick = lambda self: fail(self, None)
else:
    actor.DetokenizerActor.handle_tick = stick
sys.exit(run_actor(make))
"""


@pytest.mark.parametrize("how", ["die", "stick"])
def test_a_process_that_fails_or_sticks_says_so_and_leaves_an_incident(how: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "PAGEANT_RUNTIME_DIR": str(tmp_path / "run"), "PAGEANT_STATUS_FILE": str(tmp_path / "status"),
        "PAGEANT_LOG_FORMAT": "json", "PAGEANT_HEARTBEAT_INTERVAL": "0.02", "PAGEANT_STALL_TIMEOUT": "0.5",
        "PAGEANT_MODEL": str(ROOT / "models" / "pageant-stories"),
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said: list[dict[str, Any]] = []
        for line in process.stderr:
            if line.startswith("{"):
                said.append(json.loads(line))
                if said[-1]["event"] == "incident" and how == "stick":
                    assert read_status(tmp_path / "status") == "STALLED"
                    process.kill()
        status = process.wait(30)
    assert status != 0 and (how == "stick" or status == EXIT_FATAL)
    (kept,) = (tmp_path / "run" / "incidents").iterdir()
    bundle = json.loads(kept.read_bytes())
    assert bundle["service"] == "detokenizer"
    if how == "die":
        assert "ZeroDivisionError" in json.dumps(bundle["error"])
        assert [line for line in said if line["event"] == "fatal"]
    else:
        assert bundle["cause"] == "the event loop is stuck: it handles no messages"
        assert any("in stick" in line or " stick:" in line for lines in bundle["stacks"].values() for line in lines)
