"""Where a leader takes in the ranks of its group: a TCP port, until all have come."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from dataclasses import dataclass

import structlog

from services.worker.hosts.messages import ANY, LinkHello, RankHello, RankRefused, welcome
from shared.config import Settings
from shared.data_link.addresses import prepare
from shared.errors import ConfigError, FatalError, ProtocolError
from shared.messages import schema_hash
from shared.ranks.channel import Channel
from shared.ranks.handshake import SECONDS, admit

JOIN_SECONDS = 60.0  # that ranks have, once the leader has loaded its own part
MOST_GUESTS = 64  # connections that have not shown yet what they are
TOKEN_BYTES = 16

log = structlog.get_logger()


@dataclass(slots=True)
class JoinedRank:
    """The leader's ends of a rank's two connections; the second one comes last."""

    channel: Channel
    token: bytes
    link: socket.socket | None = None


class RankListener:
    """Listens until it is closed.  Nothing is read of a connection that has not shown the deployment's keys."""

    def __init__(self, settings: Settings, key: bytes) -> None:
        """Raises ConfigError where nothing can listen at `rank_port`."""
        self._settings = settings
        self._key = key
        self._ranks = settings.engine.members
        self._numbers = range(1, self._ranks)  # whose places are given here
        self._joined: dict[int, JoinedRank] = {}
        self._changed = threading.Condition()
        self._guests = threading.BoundedSemaphore(MOST_GUESTS)
        self._closed = False
        port = settings.deployment.rank_port
        try:
            self._listener = socket.create_server(("", port), backlog=MOST_GUESTS)
        except OSError as error:
            raise ConfigError(f"no rank can join at rank_port {port}: {error}") from error
        self.port = int(self._listener.getsockname()[1])
        log.info("ranks_awaited", port=self.port, ranks=list(self._numbers))
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()

    def wait_for_all(self, seconds: float = JOIN_SECONDS) -> list[JoinedRank]:
        """Ranks 1, 2, ... in order.  Raises FatalError where one does not come in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while missing := self._missing():
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    names = ", ".join(map(str, missing))
                    raise FatalError(
                        f"rank {names} has not joined at port {self.port} within {seconds:g} s: is it started with "
                        f"`pageant rank --join tcp://THIS_HOST:{self.port}`, and can it reach this host?"
                    )
                self._changed.wait(left)
            members = [self._joined.pop(number) for number in self._numbers]
            self._numbers = range(0)
            return members

    def close(self) -> None:
        """The ranks that `wait_for_all` has returned stay connected."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._joined:
                _hang_up(self._joined.popitem()[1])
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _missing(self) -> list[int]:
        """Those that have not joined, or have ended since: another process may take the place."""
        return [number for number in self._numbers if not self._is_there(number)]

    def _is_there(self, number: int) -> bool:
        rank = self._joined.get(number)
        return rank is not None and rank.link is not None and not rank.channel.is_ended()

    def _accept(self) -> None:
        while not self._closed:
            try:
                end, _ = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # there is no descriptor at present, or this is the end
                continue
            if not self._guests.acquire(blocking=False):
                end.close()
                continue
            threading.Thread(target=self._take_in, args=(end,), name="rank joins", daemon=True).start()

    def _take_in(self, end: socket.socket) -> None:
        stays = False
        try:
            prepare(end)
            admit(end, self._key)
            channel = Channel(end)
            hello = channel.receive(RankHello, LinkHello, patience=SECONDS)
            if isinstance(hello, LinkHello):
                stays = self._connect(end, hello)
            elif isinstance(hello, RankHello):
                stays = self._place(channel, hello)
        except (OSError, ProtocolError, FatalError) as error:
            log.warning("rank_refused", reason=str(error))
        finally:
            self._guests.release()
            if not stays:
                end.close()

    def _place(self, channel: Channel, hello: RankHello) -> bool:
        with self._changed:
            number, refused = self._number_for(hello)
            if refused is not None:
                log.warning("rank_refused", rank=hello.rank, reason=refused.reason)
                channel.send(refused)
                return False
            token = secrets.token_bytes(TOKEN_BYTES)
            channel.name = f"rank {number}"
            channel.send(welcome(self._settings, number, token))
            if (former := self._joined.get(number)) is not None:
                _hang_up(former)
            self._joined[number] = JoinedRank(channel, token)
            return True

    def _number_for(self, hello: RankHello) -> tuple[int, RankRefused | None]:
        if hello.schema != schema_hash():
            return ANY, RankRefused("it is of another version than this leader", for_good=True)
        if hello.rank != ANY and hello.rank not in range(1, self._ranks):
            reason = f"there is no rank {hello.rank} beside the leader in a group of {self._ranks}"
            return ANY, RankRefused(f"{reason} ({self._settings.engine.ranks_by})", for_good=True)
        free = [one for one in self._numbers if hello.rank in (ANY, one)]
        free = [one for one in free if one not in self._joined or self._joined[one].channel.is_ended()]
        if free and not self._closed:
            return free[0], None
        reason = "all ranks have joined" if hello.rank == ANY else f"another process is rank {hello.rank}"
        return ANY, RankRefused(reason, for_good=False)

    def _connect(self, end: socket.socket, hello: LinkHello) -> bool:
        with self._changed:
            for number, rank in self._joined.items():
                if rank.link is None and secrets.compare_digest(rank.token, hello.token):
                    rank.link = end
                    log.info("rank_joined", rank=number)
                    self._changed.notify_all()
                    return True
        return False


def _hang_up(rank: JoinedRank) -> None:
    rank.channel.close()
    if rank.link is not None:
        rank.link.close()
