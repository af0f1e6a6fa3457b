"""A placed group over actors that are played, and one over real processes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.ray.group import ENDING, SILENCE, PlacedGroup, rank_environment, rank_settings, reason_of
from services.worker.ray.placed import PlacedRank, keys_digest, why_not_these_keys
from shared.config import Settings, load_settings
from shared.errors import FatalError
from shared.processes.exit_status import EXIT_CONFIG, EXIT_FATAL
from shared.ranks.handshake import group_key

READY = '{"status": null, "state": "READY", "words": ""}'


class Call:
    """A method of an actor: `remote` gives what `get` then returns or raises; None: there is no answer."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.remote = answer


class PlayedActor:
    def __init__(self, host: str) -> None:
        self.answer: Any = READY
        self.started: list[Any] = []
        self.signals: list[int] = []
        self.wrong = ""
        self.is_killed = False
        self.host = Call(lambda: [host])
        self.look = Call(lambda: [self.answer])
        self.start = Call(self._start)
        self.signal = Call(self.signals.append)
        self.end = Call(lambda: [None])

    def _start(self, *arguments: Any) -> list[Any]:
        self.started.append(arguments)
        return [self.wrong]


class PlayedRay:
    def get(self, ref: Any, *, timeout: float | None = None) -> Any:
        (answer,) = ref
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [ref for ref in refs if ref != [None]], [ref for ref in refs if ref == [None]]

    def kill(self, actor: PlayedActor) -> None:
        actor.is_killed = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("services.worker.ray.group.time.sleep", lambda seconds: None)
    return made


def group_of(clock: Clock, *hosts: str) -> tuple[PlacedGroup, list[PlayedActor]]:
    actors = [PlayedActor(host) for host in hosts]
    return PlacedGroup(PlayedRay(), actors, clock), actors


def test_the_leader_is_a_worker_and_the_others_join_it_where_it_was_placed(clock: Clock, tmp_path: Path) -> None:
    group, actors = group_of(clock, "10.0.0.7", "10.0.0.8", "10.0.0.7")
    settings = Settings.of(executor="ray", tensor_parallel_size=3, rank_port=5600, runtime_dir=str(tmp_path))
    group.start(settings, "digest")
    join = "services.worker.hosts tcp://10.0.0.7:5600"
    assert [one.started[0][0] for one in actors] == ["services.worker", f"{join} 1", f"{join} 2"]
    for one in actors:
        assert all(isinstance(argument, str) for argument in one.started[0]), "nothing but texts passes Ray"
        assert one.started[0][2] == "digest"
    assert group.look() and group.leader.report.state == "READY"


def test_a_rank_that_cannot_start_says_why_and_where(clock: Clock) -> None:
    group, actors = group_of(clock, "a", "b")
    actors[1].wrong = "there is no /run/pageant/curve.json"
    with pytest.raises(FatalError, match=r"^rank 1 at b: there is no /run/pageant/curve\.json$"):
        group.start(Settings.of(executor="ray", tensor_parallel_size=2), "")


def test_an_actor_that_is_gone_ends_the_group_after_the_leader_could_speak(clock: Clock) -> None:
    group, actors = group_of(clock, "a", "b")
    assert group.look()
    page = "The actor died.\n\tip: b\nThe actor is dead because its node has died. Node Id: 7f"
    actors[1].answer = RuntimeError(page)
    assert group.look(), "the leader may still say something"
    assert group.leader.report.status is None
    clock.now += ENDING
    assert not group.look()
    assert group.verdict() == (EXIT_FATAL, "rank 1: The actor is dead because its node has died")


def test_a_leader_that_ends_with_a_rank_is_not_waited_for(clock: Clock) -> None:
    group, actors = group_of(clock, "a", "b")
    actors[0].answer = '{"status": 70, "state": "READY", "words": "rank 1 of the group has ended"}'
    actors[1].answer = RuntimeError("The actor died. Really")
    assert not group.look()
    assert group.verdict() == (EXIT_FATAL, "rank 1: The actor died")


def test_a_silent_node_is_given_up(clock: Clock) -> None:
    group, actors = group_of(clock, "a")
    actors[0].answer = None
    assert group.look()
    clock.now += SILENCE
    assert group.look()
    clock.now += 1
    assert not group.look()
    assert group.verdict() == (EXIT_FATAL, f"rank 0: its actor has been silent for {SILENCE:g} s")


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        ({"status": 0, "words": ""}, (0, "")),
        ({"status": EXIT_CONFIG, "words": "it has other weights"}, (EXIT_CONFIG, "it has other weights")),
        ({"status": -9, "words": ""}, (EXIT_FATAL, "rank 0 has ended with status -9")),
        ({"status": 70, "words": "no step"}, (EXIT_FATAL, "rank 0 has ended with status 70: no step")),
    ],
)
def test_the_leaders_end_is_the_groups(clock: Clock, report: dict[str, Any], verdict: tuple[int, str]) -> None:
    group, actors = group_of(clock, "a")
    actors[0].answer = json.dumps({"state": "", **report})
    assert not group.look()
    assert group.verdict() == verdict


def test_a_rank_that_is_refused_for_good_makes_the_group_hopeless(clock: Clock) -> None:
    group, actors = group_of(clock, "a", "b")
    actors[0].answer = '{"status": 70, "state": "", "words": "rank 1 has not joined"}'
    actors[1].answer = json.dumps({"status": EXIT_CONFIG, "state": "", "words": "the leader refuses this rank"})
    assert not group.look()
    assert group.verdict() == (EXIT_CONFIG, "the leader refuses this rank")


def test_signals_go_to_the_leader_and_the_end_to_all(clock: Clock) -> None:
    group, actors = group_of(clock, "a", "b")
    group.signal(signal.SIGUSR1)
    assert [one.signals for one in actors] == [[signal.SIGUSR1], []]
    group.end()
    assert all(one.is_killed for one in actors)


def test_a_leader_that_dies_of_what_it_was_asked_has_left(clock: Clock) -> None:
    group, actors = group_of(clock, "a")
    actors[0].answer = '{"status": -15, "state": "", "words": ""}'
    group.signal(signal.SIGTERM)
    assert not group.look()
    assert group.verdict() == (0, "")


def test_the_reason_is_a_sentence() -> None:
    assert reason_of(RuntimeError("")) == "RuntimeError"
    assert (
        reason_of(RuntimeError("Get timed out: some object(s) not ready."))
        == "Get timed out: some object(s) not ready."
    )


def test_no_key_of_clients_and_no_place_of_this_host_passes_ray(tmp_path: Path) -> None:
    settings = Settings.of(
        executor="ray", api_keys="acme:secret-key", advertise_host="gateway.example", status_file="/tmp/status",
        runtime_dir=str(tmp_path), max_num_seqs=7, kv_events="tcp://*:1", host="0.0.0.0", http_port=9,
    )  # fmt: skip
    variables = rank_environment(rank_settings(settings))
    assert "secret-key" not in str(variables) and "example" not in str(variables)
    read = load_settings(environ=variables)
    assert read.scheduling.max_num_seqs == 7
    assert (read.gateway.host, read.gateway.http_port) == ("0.0.0.0", 8000), "metrics listen there"
    assert read.engine.num_threads == 1, "as many as CPUs were asked for"
    assert read.deployment.status_file == "" and read.deployment.runtime_dir == str(tmp_path)
    assert Path(read.engine.model).is_absolute(), "a bundled model is found from any directory"


# -- a real process


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(rank: PlacedRank, command: str, runtime_dir: Path, **variables: str) -> str:
    group_key(runtime_dir)
    given = {"PAGEANT_RUNTIME_DIR": str(runtime_dir), **variables}
    return rank.start(command, json.dumps(given), keys_digest(runtime_dir))


def report(rank: PlacedRank) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rank.look())
    return found


def test_a_process_is_started_with_the_settings_given_and_none_of_the_nodes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEANT_CONFIG", "/nowhere/pageant.toml")
    rank = PlacedRank()
    assert report(rank) == {"status": None, "state": "", "words": ""}
    address = "tcp://127.0.0.1:1"
    assert start(rank, f"services.worker.hosts {address} 0x", tmp_path) == ""
    until(lambda: report(rank)["status"] is not None)
    assert report(rank)["status"] not in (0, EXIT_CONFIG), "it read its settings, and a rank that is no number"
    rank.end()


def test_a_process_gets_signals_and_ends_with_its_actor(tmp_path: Path) -> None:
    rank = PlacedRank()
    assert start(rank, "services.worker.hosts tcp://127.0.0.1:1 1", tmp_path) == ""
    assert report(rank)["status"] is None
    rank.signal(signal.SIGTERM)
    until(lambda: report(rank)["status"] == -signal.SIGTERM)
    rank.signal(signal.SIGTERM)  # to nothing
    second = PlacedRank()
    assert start(second, "services.worker.hosts tcp://127.0.0.1:1 1", tmp_path) == ""
    second.end()
    assert report(second)["status"] == -signal.SIGKILL


def test_last_words_are_passed_on(tmp_path: Path) -> None:
    rank = PlacedRank()
    assert start(rank, "services.worker.hosts nonsense", tmp_path) == ""
    until(lambda: report(rank)["status"] == EXIT_CONFIG)
    assert "must be tcp://HOST:PORT" in report(rank)["words"]
    rank.end()


def test_a_node_without_the_deployments_keys_starts_nothing_and_makes_none(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    group_key(own)
    rank = PlacedRank()
    given = json.dumps({"PAGEANT_RUNTIME_DIR": str(other)})
    wrong = rank.start("services.worker", given, keys_digest(own))
    assert wrong == f"there is no {other}/curve.json: copy it from the host of `pageant serve`"
    assert not other.exists()
    group_key(other)
    assert "holds other keys" in rank.start("services.worker", given, keys_digest(own))
    (own / "curve.json").replace(other / "curve.json")
    assert why_not_these_keys(other, keys_digest(other)) == ""
