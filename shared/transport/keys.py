"""CURVE keys of a deployment on tcp://: made at first start in the runtime directory, readable by its owner only.

There are two pairs: every inbox proves itself with the server pair, every sender with the client pair; an inbox lets
in only the deployment's own client key.  Whoever lacks the directory gets no frame through.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from shared.errors import ConfigError

FILE = "curve.json"
WAIT_SECONDS = 5.0


class Keys(msgspec.Struct, frozen=True):
    """Both pairs, Z85 text."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_server = True
        socket.curve_publickey = self.server_public
        socket.curve_secretkey = self.server_secret

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret


class KeyGuard:
    """Answers ZeroMQ's authentication requests: the deployment's client key, or nothing."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=_OneKey(keys.client_public))

    def stop(self) -> None:
        self._authenticator.stop()


class _OneKey:
    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def load_keys(directory: Path) -> Keys:
    """Read the deployment's keys, making them where nobody has yet.  Safe when many processes start at once."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / FILE
    if not path.exists():
        _make_keys(path)
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Keys)
        except msgspec.DecodeError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"{path} holds no keys: {error}") from error
            time.sleep(0.05)


def _make_keys(path: Path) -> None:
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    keys = Keys(server_public, server_secret, client_public, client_secret)
    partial = path.with_name(f".{FILE}.{os.getpid()}.{os.urandom(4).hex()}")
    partial.touch(mode=0o600)
    partial.write_bytes(msgspec.json.encode(keys))
    try:
        os.link(partial, path)  # atomic, and fails where another process was first
    except FileExistsError:
        pass
    finally:
        partial.unlink()
