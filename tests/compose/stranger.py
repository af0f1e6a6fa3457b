"""Run in a container on the troupe's network that lacks its keys: what does it get, and whom does it reach?

Prints a line of JSON: how many frames came to it in answer.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time

import zmq

from shared.messages import Drain, Hello, ServiceName, encode, schema_hash

SECONDS = 4.0
NAME = "stranger"


def say(context: zmq.Context[zmq.Socket[bytes]], address: str, own: str, *, with_keys: bool) -> zmq.Socket[bytes]:
    """A greeting, and an order to leave: without keys, or with some that it made itself."""
    pusher = context.socket(zmq.PUSH)
    if with_keys:
        pusher.curve_serverkey, _ = zmq.curve_keypair()
        pusher.curve_publickey, pusher.curve_secretkey = zmq.curve_keypair()
    pusher.connect(address)
    for message in (Hello(ServiceName.DETOKENIZER, NAME, own, 1, schema_hash()), Drain(0.0)):
        with contextlib.suppress(zmq.Again):  # its connection was refused before it could say all
            pusher.send(encode(message), zmq.NOBLOCK)
    return pusher


def shout(host: str, port: int) -> int:
    """Bytes that are no ZeroMQ at all; how many come back before its greeting is asked for."""
    with socket.create_connection((host, port), timeout=SECONDS) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 4096)
        plain.settimeout(1.0)
        try:
            return len(plain.recv(65536))
        except (TimeoutError, ConnectionError):
            return 0


def main(addresses: list[str]) -> None:
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    port = inbox.bind_to_random_port("tcp://*")
    own = f"tcp://{socket.gethostbyname(socket.gethostname())}:{port}"
    pushers = [say(context, address, own, with_keys=keys) for address in addresses for keys in (False, True)]
    for address in addresses:
        host, _, number = address.removeprefix("tcp://").rpartition(":")
        shout(host, int(number))
    deadline, num_frames = time.monotonic() + SECONDS, 0
    while (left := deadline - time.monotonic()) > 0:
        num_frames += bool(inbox.poll(int(1000 * left)) and inbox.recv_multipart())
    for pusher in pushers:
        pusher.close(linger=0)
    context.destroy(linger=0)
    print(json.dumps({"frames": num_frames}))


if __name__ == "__main__":
    main(sys.argv[1:])
