"""Deaths of workers: for which requests they are counted, and which of them are taken back."""

from __future__ import annotations

import pytest

from services.scheduler.planning import quarantine
from services.scheduler.planning.quarantine import WorkerDeaths
from services.scheduler.state.sequence import Request
from tests.unit.scheduler.worlds.world import World


def world_of(num_requests: int) -> tuple[World, list[Request]]:
    """Requests in a step of a worker."""
    world = World()
    for index in range(num_requests):
        world.add(f"r{index}", [index, 1, 2], max_tokens=8)
    world.plan("w0")
    return world, list(world.scheduler.requests.values())


def test_the_last_death_of_a_worker_that_lives_is_taken_back_once() -> None:
    _, (request,) = world_of(1)
    deaths = WorkerDeaths()
    for instance in ("w0", "w1", "w0"):
        deaths.count(instance, [request])
    deaths.take_back("w0")
    assert request.num_worker_deaths == 2
    deaths.take_back("w0")
    deaths.take_back("other")
    assert request.num_worker_deaths == 2
    deaths.take_back("w1")
    assert request.num_worker_deaths == 1


def test_a_death_stays_once_another_process_has_the_name() -> None:
    world, (request,) = world_of(1)
    world.lose("w0")
    world.join("w0")
    world.scheduler.deaths.take_back("w0")
    assert request.num_worker_deaths == 1
    world.run()
    world.assert_outputs()


def test_a_death_identifies_the_one_request_that_was_suspected() -> None:
    _, requests = world_of(3)
    deaths = WorkerDeaths()
    assert deaths.count("w0", requests[:2]) == [] and deaths.count("w1", requests[1:]) == []
    assert [request.is_quarantined for request in requests] == [False, True, False]
    assert deaths.count("w2", requests) == [requests[1]]


def test_of_workers_without_end_the_last_deaths_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_REMEMBERED", 2)
    _, requests = world_of(3)
    deaths = WorkerDeaths()
    for index, request in enumerate(requests):
        deaths.count(f"w{index}", [request])
    for index in range(3):
        deaths.take_back(f"w{index}")
    assert [request.num_worker_deaths for request in requests] == [1, 0, 0]


def test_a_worker_that_comes_again_has_died_before() -> None:
    world = World()
    world.add("r", [1, 2, 3])
    world.plan("w0")
    world.join("w0")
    assert world.scheduler.counters.num_worker_losses == 1 and world.scheduler.requests["r"].num_worker_deaths == 1
    world.run()
    world.assert_outputs("r")
    world.assert_idle()
