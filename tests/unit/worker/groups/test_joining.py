"""How ranks join a leader over TCP: places, refusals in a line, and that a process with other keys is not read."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from services.worker.hosts import joining
from services.worker.hosts.joining import JoinedGroup, join_group
from services.worker.hosts.listening import JoinedRank, RankListener
from services.worker.hosts.messages import ANY
from shared.config import Settings
from shared.errors import ConfigError, FatalError, ProtocolError
from shared.ranks.channel import BEAT, Alive, Channel, Silence, SilentRankError
from shared.ranks.handshake import MAGIC, admit, introduce

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
OWN = Settings.of(model="here", num_threads=3)


@contextmanager
def listening(ranks: int = 2, **settings: object) -> Iterator[RankListener]:
    listener = RankListener(
        Settings.of(model="there", tensor_parallel_size=ranks, executor="hosts", rank_port=0, **settings), KEY
    )
    try:
        yield listener
    finally:
        listener.close()


def join(listener: RankListener, rank: int = ANY, key: bytes = KEY) -> JoinedGroup:
    return join_group(OWN, f"tcp://127.0.0.1:{listener.port}", key, rank)


def leave(group: JoinedGroup) -> None:
    group.channel.close()
    group.link.close()
    os.close(group.memory)


def hang_up(members: list[JoinedRank]) -> None:
    for member in members:
        member.channel.close()
        assert member.link is not None
        member.link.close()


def test_ranks_take_the_places_that_they_name_or_that_are_free() -> None:
    with listening(4) as listener:
        groups = [join(listener, rank) for rank in (2, ANY, ANY)]
        assert [one.rank for one in groups] == [2, 1, 3] and {one.ranks for one in groups} == {4}
        members = listener.wait_for_all(10)
        for group, member in zip(sorted(groups, key=lambda one: one.rank), members, strict=True):
            group.channel.send(Alive())
            group.link.sendall(b"data")
            assert member.link is not None and member.link.recv(4) == b"data"
            leave(group)
        hang_up(members)


def test_a_rank_has_the_leaders_settings_but_for_those_of_its_host() -> None:
    with listening(dtype="float32", max_num_seqs=7, block_size=32, num_threads=1) as listener:
        group = join(listener)
    found = group.settings
    assert (found.engine.dtype, found.scheduling.max_num_seqs, found.memory.block_size) == ("float32", 7, 32)
    assert (found.engine.model, found.engine.num_threads) == ("here", 3)
    leave(group)


@pytest.mark.parametrize(
    ("rank", "key", "why"),
    [
        (2, KEY, r"there is no rank 2 beside the leader in a group of 2 \(tensor_parallel_size\)$"),
        (0, KEY, "there is no rank 0 beside the leader"),
        (1, OTHER_KEY, "this rank and its leader have different keys: both need the same curve.json"),
    ],
)
def test_what_can_never_join_is_told_why(rank: int, key: bytes, why: str) -> None:
    with listening() as listener, capture_logs() as lines:
        with pytest.raises(ConfigError, match=why):
            join(listener, rank, key)
        with pytest.raises(FatalError, match="rank 1 has not joined at port"):
            listener.wait_for_all(0)
        while not any(line["event"] == "rank_refused" for line in lines):  # said after it was answered
            time.sleep(0.001)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "schema_hash", lambda: "another")
    with listening() as listener, pytest.raises(ConfigError, match="it is of another version than this leader"):
        join(listener)


def test_a_place_is_taken_until_its_rank_is_gone() -> None:
    with listening() as listener:
        first = join(listener, 1)
        with pytest.raises(FatalError, match="another process is rank 1"):
            join(listener, 1)
        with pytest.raises(FatalError, match="all ranks have joined"):
            join(listener)
        leave(first)
        second = eventually(lambda: join(listener, 1))
        (member,) = listener.wait_for_all(10)
        second.channel.send(Alive())
        assert not member.channel.is_ended()
        leave(second)
        hang_up([member])


def test_a_rank_that_has_ended_again_is_not_there() -> None:
    """As one whose pod was replaced while the leader loaded its own part: its successor is on its way."""
    with listening() as listener:
        first = join(listener, 1)
        while listener._joined[1].link is None:  # its second connection comes last
            time.sleep(0.001)
        leave(first)
        while not listener._joined[1].channel.is_ended():
            time.sleep(0.001)
        with pytest.raises(FatalError, match="rank 1 has not joined at port"):
            listener.wait_for_all(0)
        second = join(listener, 1)
        (member,) = listener.wait_for_all(10)
        assert not member.channel.is_ended()
        leave(second)
        hang_up([member])


def eventually(join_once: Callable[[], JoinedGroup]) -> JoinedGroup:
    """The end of a connection takes its time to come."""
    while True:
        with contextlib.suppress(FatalError):
            return join_once()


def test_a_stranger_gets_no_byte_read_beyond_the_proof() -> None:
    with listening() as listener:
        with socket.create_connection(("127.0.0.1", listener.port)) as end:
            end.sendall(b"\0" * 4096)
            said = b""
            with contextlib.suppress(ConnectionError):  # what was not read resets the connection
                while piece := end.recv(4096):
                    said += piece
        assert said.startswith(MAGIC) and len(said) <= len(MAGIC) + 16 + 1, "a challenge and a refusal"
        leave(join(listener))


def test_a_false_leader_is_noticed() -> None:
    """It has not the keys, so it cannot show them."""
    ours, theirs = socket.socketpair()
    theirs.sendall(MAGIC + b"c" * 16 + b"\1" + b"p" * 32)
    with pytest.raises(ConfigError, match="different keys"):
        introduce(ours, KEY)
    theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ProtocolError, match="leads no ranks"):
        introduce(ours, KEY)
    ours.close()
    with pytest.raises(OSError):
        admit(theirs, KEY)
    theirs.close()


def test_a_leader_that_is_not_there_yet_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    with capture_logs() as lines, pytest.raises(KeyboardInterrupt):
        join_group(OWN, f"tcp://127.0.0.1:{port}", KEY, sleep=pause)
    (line,) = lines
    assert line["event"] == "leader_not_reached" and "refused" in line["reason"]


@pytest.mark.parametrize("address", ["127.0.0.1:5560", "tcp://host", "tcp://host:0", "tcp://host:70000", "udp://a:1"])
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(ConfigError, match="must be tcp://HOST:PORT"):
        join_group(OWN, address, KEY)


def test_a_port_that_is_taken_is_said_in_a_line() -> None:
    with listening() as listener, pytest.raises(ConfigError, match=f"no rank can join at rank_port {listener.port}:"):
        RankListener(Settings.of(tensor_parallel_size=2, rank_port=listener.port), KEY)


def test_silence_is_noticed_and_signs_of_life_break_it() -> None:
    ours, theirs = socket.socketpair()
    here, there = Channel(ours, "rank 1"), Channel(theirs, "the leader")
    there.send(Alive())
    error = here.watch(2 * BEAT)
    assert isinstance(error, SilentRankError) and str(error) == "rank 1 of the group has been silent for 0.5 s"
    there.close()
    assert "rank 1 of the group has ended" in str(here.watch(60))
    here.close()


def test_a_listener_that_stood_still_has_heard_nothing_meanwhile() -> None:
    silence = Silence(2.0)
    assert not silence.wait(3600), "it was stopped itself"
    assert not silence.wait(BEAT)
    silence.hear()
    assert [silence.wait(0.5) for _ in range(4)] == [False, False, False, True]
