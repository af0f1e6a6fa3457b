"""A socket that publishes payloads with numbers, and one that gives earlier ones again, as vLLM's publisher does.

    published   topic, number, payload
    asked       number from which on, 8 bytes; of a REQ or DEALER socket, behind an empty frame
    replayed    topic, number, payload, for each that is still known; then an empty topic, -1, and nothing

Numbers have 8 bytes, big-endian, and begin at 0 with every life of the scheduler.
"""

from __future__ import annotations

import threading
from collections import deque

import structlog
import zmq

from shared.errors import ConfigError

log = structlog.get_logger()

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
MAX_QUEUED = 100_000  # to a subscriber that reads too slowly; beyond, it misses some, and can ask for them
ROUND = 200  # milliseconds, in which nothing may come
LINGER = 500  # milliseconds, in which the last events leave
CLOSE_SECONDS = 2.0


class EventPublisher:
    """One thread has the sockets; another one publishes."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, num_kept: int) -> None:
        """Raises ConfigError where an endpoint cannot be bound."""
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=num_kept)
        self._number = 0
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(MAX_QUEUED)
        self._replays = self._context.socket(zmq.ROUTER)
        self._replays.set_hwm(2 * (num_kept + 1))  # for one whole replay, to a client that reads slowly
        self._inner, self._outer = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        try:
            self.endpoint = bound(self._events, endpoint, "kv_events")
            self.replay_endpoint = bound(self._replays, replay_endpoint, "kv_events_replay") if replay_endpoint else ""
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._inner.bind("inproc://payloads")
        self._outer.connect("inproc://payloads")
        self._thread = threading.Thread(target=self._loop, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, payload: bytes) -> None:
        self._outer.send(payload)

    def close(self) -> None:
        self._outer.send(b"")
        self._thread.join(timeout=CLOSE_SECONDS)
        self._outer.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inner, zmq.POLLIN)
        poller.register(self._replays, zmq.POLLIN)
        is_open = True
        while is_open:
            ready = dict(poller.poll(ROUND))
            if self._inner in ready:
                is_open = self._publish_one(self._inner.recv())
            if self._replays in ready:
                self._replay(self._replays.recv_multipart())
        for socket in (self._inner, self._events, self._replays):
            socket.close(linger=LINGER)

    def _publish_one(self, payload: bytes) -> bool:
        """False at the end, which is an empty one."""
        if not payload:
            return False
        number = self._number.to_bytes(NUMBER_BYTES, "big")
        self._number += 1
        self._kept.append((number, payload))
        self._events.send_multipart((self._topic, number, payload))
        return True

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
            log.warning("kv_events_replay_refused", num_frames=len(frames))
            return
        client, _, first = frames
        for number, payload in self._kept:
            if number >= first:
                self._replays.send_multipart((client, b"", self._topic, number, payload))
        self._replays.send_multipart((client, b"", b"", END, b""))


def bound(socket: zmq.Socket[bytes], endpoint: str, setting: str) -> str:
    """The address at which it is bound.  Raises ConfigError."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{setting} {endpoint} cannot be bound: {error}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
