"""Ranks of one host from group to group: which stay, which are replaced, and how often."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.worker.groups import rank_processes
from services.worker.groups.group_sockets import group_socket_pair, send_group, wait_for_group
from services.worker.groups.rank_processes import MOST_GROUPS, LastingRanks, StartedRanks
from shared.config import Settings
from shared.ranks.channel import Channel
from tests.unit.worker.groups.idle_rank import Joined

ROOT = Path(__file__).resolve().parents[4]
WAIT = 30.0  # seconds


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the ranks' module is found."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def lasting(**settings: object) -> LastingRanks:
    places = [(0, 1), (0, 2)]
    return LastingRanks(
        Settings.of(tensor_parallel_size=3, **settings), places, [1, 2], "tests.unit.worker.groups.idle_rank"
    )


def said(started: StartedRanks) -> list[Joined]:
    os.close(started.memory)
    channels = [Channel(end) for end in started.ends]
    found = [channel.receive(Joined, patience=WAIT) for channel in channels]
    for channel in channels:
        channel.close()
    return found


@pytest.mark.usefixtures("here")
def test_those_that_are_left_join_the_next_group() -> None:
    ranks = lasting()
    first = ranks.next_group()
    assert said(first) == [Joined(1, 1, 2), Joined(2, 1, 2)]
    lost, left = first.processes
    lost.kill()
    lost.wait(WAIT)
    second = ranks.next_group()
    assert said(second) == [Joined(1, 1, 2), Joined(2, 2, 2)]
    assert second.processes[1].pid == left.pid and second.processes[0].pid != lost.pid
    assert [*second.numbers] == [1, 2] and second.lasting is ranks
    ranks.dismiss()
    assert [process.wait(WAIT) for process in second.processes] == [0, 0]


@pytest.mark.usefixtures("here")
def test_groups_that_end_again_and_again_are_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = lasting()
    for _ in range(MOST_GROUPS):
        assert ranks.may_form_again
        started = ranks.next_group()
        said(started)
    fifth = ranks.may_form_again
    monkeypatch.setattr(rank_processes, "GROUPS_SECONDS", 0.0)
    later = ranks.may_form_again
    ranks.dismiss()
    assert [process.wait(WAIT) for process in started.processes] == [0, 0]
    assert (fifth, later) == (False, True), "four in a minute, and another once the first is longer ago"


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2},
        {"enable_expert_parallel": True, "enable_eplb": True},
        {"kernels": "torch"},
    ],
)
def test_what_cannot_go_on(settings: dict[str, object]) -> None:
    assert lasting().may_form_again and not lasting(**settings).may_form_again


def test_a_socket_that_the_leader_has_closed_gives_no_group() -> None:
    mine, theirs = group_socket_pair()
    with mine, theirs:
        send_group(mine, [mine.fileno()])
        (descriptor,) = wait_for_group(theirs)
        os.close(descriptor)
        mine.close()
        assert wait_for_group(theirs) == []
        with pytest.raises(OSError):
            send_group(theirs, [0])
