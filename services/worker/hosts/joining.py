"""A rank's way to its leader over TCP.  Without torch: the leader's settings say what is loaded."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.worker.hosts.messages import ANY, LinkHello, RankHello, RankRefused, RankWelcome
from shared.config import Settings
from shared.data_link.addresses import prepare
from shared.errors import ConfigError, FatalError, PageantError, ProtocolError
from shared.messages import schema_hash
from shared.ranks.addresses import read_address
from shared.ranks.channel import Channel
from shared.ranks.handshake import SECONDS, introduce

AGAIN = 0.5  # seconds before a leader that is not there is tried again
NEXT_WORD = 30.0  # seconds until that is said again

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """One rank's end of all that a group needs."""

    rank: int
    ranks: int
    settings: Settings
    channel: Channel
    link: socket.socket
    memory: int  # descriptor of memory for this rank alone, empty as yet


def join_group(
    settings: Settings,
    address: str,
    key: bytes,
    rank: int = ANY,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> JoinedGroup:
    """Waits for a leader that is not there yet.

    Raises ConfigError where it refuses this rank for good, and FatalError where trying again may help.
    """
    place = read_address(address)
    next_word = clock()
    while True:
        try:
            return _join(settings, place, key, rank)
        except OSError as error:
            if clock() >= next_word:
                log.warning("leader_not_reached", address=address, reason=str(error))
                next_word = clock() + NEXT_WORD
        except ProtocolError as error:
            raise FatalError(f"{address}: {error}") from error
        sleep(AGAIN)


def _join(settings: Settings, place: tuple[str, int], key: bytes, rank: int) -> JoinedGroup:
    channel = Channel(_connected(place, key), "the leader")
    try:
        channel.send(RankHello(schema_hash(), rank))
        answer = channel.receive(RankWelcome, RankRefused, patience=SECONDS)
        if isinstance(answer, RankRefused):
            raise _refusal(answer)
        link = _connected(place, key)
    except BaseException:
        channel.close()
        raise
    assert isinstance(answer, RankWelcome)
    Channel(link, "the leader").send(LinkHello(answer.token))
    own = os.memfd_create("pageant-rank")
    return JoinedGroup(answer.rank, answer.ranks, answer.apply(settings), channel, link, own)


def _refusal(answer: RankRefused) -> PageantError:
    if answer.for_good:
        return ConfigError(f"the leader refuses this rank: {answer.reason}")
    return FatalError(f"the leader has no place for this rank now: {answer.reason}")


def _connected(place: tuple[str, int], key: bytes) -> socket.socket:
    """Raises OSError, ProtocolError and ConfigError as `introduce`."""
    end = socket.create_connection(place, timeout=SECONDS)
    try:
        prepare(end)
        introduce(end, key)
    except BaseException:
        end.close()
        raise
    return end
