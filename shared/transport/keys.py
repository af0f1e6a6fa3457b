"""CURVE keys of a deployment on tcp://: made at first start in the runtime directory, readable by its owner only.

There are two pairs: every inbox proves itself with the server pair, every sender with the client pair; an inbox lets
in only the deployment's own client key.  A process without access to the directory gets no frame through.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from shared.errors import ConfigError, FatalError

FILE = "curve.json"
WAIT_SECONDS = 5.0
CONTEST_SECONDS = 60.0  # in which a scheduler's keys, put back, are replaced again only by another deployment


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
    """Read the deployment's keys, making them where there are none.  Safe when many processes start at once."""
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


class KeyFile:
    """Keeps the key file in place, so that a process that joins a running deployment finds its keys.

    A process that starts just after the directory was deleted makes other keys there.  The scheduler puts its own back,
    since all others have those; the process with other keys then ends, and its next life reads the right ones.
    """

    def __init__(self, directory: Path, keys: Keys, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._keys = keys
        self._clock = clock
        self._replaced_at = float("-inf")
        self._differs_since: float | None = None
        self.is_schedulers = False

    def keep(self) -> str:
        """What was made anew, if anything.  Raises OSError, ConfigError where two deployments have one directory, and
        FatalError where this process has keys that are not the deployment's."""
        found = _read_keys(self._directory / FILE)
        if found == self._keys:
            self._differs_since = None
            return ""
        if found is None:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_keys(self._directory / FILE, self._keys, os.link)
            return "its keys"
        now = self._clock()
        if not self.is_schedulers:
            self._differs_since = now if self._differs_since is None else self._differs_since
            if now - self._differs_since > WAIT_SECONDS:
                raise FatalError(f"{self._directory / FILE} holds other keys than this process; a restart reads them")
            return ""
        if now - self._replaced_at < CONTEST_SECONDS:
            raise ConfigError(
                f"another deployment has its keys in {self._directory}; give each a runtime_dir of its own"
            )
        self._replaced_at = now
        _write_keys(self._directory / FILE, self._keys, os.replace)
        return "its keys"


def _read_keys(path: Path) -> Keys | None:
    """None where there are none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Keys)
    except (OSError, msgspec.DecodeError):
        return None


def _make_keys(path: Path) -> None:
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    _write_keys(path, Keys(server_public, server_secret, client_public, client_secret), os.link)


def _write_keys(path: Path, keys: Keys, place: Callable[[Path, Path], None]) -> None:
    """`place` puts the whole file where it belongs: os.link, which leaves what is there, or os.replace."""
    partial = path.with_name(f".{FILE}.{os.getpid()}.{os.urandom(4).hex()}")
    partial.touch(mode=0o600)
    partial.write_bytes(msgspec.json.encode(keys))
    try:
        place(partial, path)  # atomic, and a link fails where another process was first
    except FileExistsError:
        pass
    finally:
        partial.unlink(missing_ok=True)
