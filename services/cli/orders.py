"""Orders to a running `pageant serve`: one line of JSON over a socket in its runtime directory, lines of text back.

Only the deployment's own user has access to the directory.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec

from services.cli.supervisor import ChildProcess, RestartFailedError, Supervisor, rolling_restart
from shared.config import DeploymentSettings
from shared.errors import ConfigError
from shared.transport.directory import answers, identity, listening, make_private

MAX_LINE = 4096
ORDER_SECONDS = 5.0  # that a client has to send its order
KEEP_SECONDS = 0.5  # between checks of the socket's path
DONE = "done"
FEWEST = {"gateway": 1, "tokenizer": 1, "scheduler": 1, "worker": 1, "draft": 0, "detokenizer": 1}
MOST = {"scheduler": 1}


class SupervisorOrder(msgspec.Struct, frozen=True):
    """Restart these services in turn, or have so many replicas of them."""

    restart: list[str] = []
    scale: dict[str, int] = {}


def objection(order: SupervisorOrder) -> str:
    """What keeps an order from being carried out, or an empty string."""
    for service in (*order.restart, *order.scale):
        if service not in FEWEST:
            return f"there is no service {service!r}"
    for service, count in order.scale.items():
        fewest, most = FEWEST[service], MOST.get(service)
        if count < fewest or (most is not None and count > most):
            return f"{service}={count}: there must be at least {fewest}" + (f" and at most {most}" if most else "")
    return ""


class OrderDesk:
    """Takes one order at a time, whenever `poll` is called; further clients wait."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._until = 0.0
        path.unlink(missing_ok=True)
        self._listener = listening(path)
        self._place = identity(path)
        self._trouble = ""
        self._client: socket.socket | None = None
        self._received = b""

    def keep(self) -> str:
        """Listen anew where the runtime directory was deleted or replaced; returns a line to report, or nothing."""
        if self._place is not None and identity(self._path) == self._place:
            return ""
        try:
            if answers(self._path):
                return self._complain(f"another pageant serve takes the orders in {self._path.parent}")
            make_private(self._path.parent)
            self._path.unlink(missing_ok=True)
            fresh = listening(self._path)
        except (OSError, ConfigError) as error:
            return self._complain(f"no orders can be taken in {self._path.parent}: {error}")
        self._listener.close()
        self._listener, self._place, self._trouble = fresh, identity(self._path), ""
        return f"{self._path.parent} was gone or another one: the socket for orders is made anew"

    def _complain(self, text: str) -> str:
        """The text, unless it is the same as before."""
        is_new, self._trouble = text != self._trouble, text
        return text if is_new else ""

    def poll(self) -> SupervisorOrder | None:
        """An order, if one has come; `report` and `finish` answer it."""
        if self._client is None:
            with contextlib.suppress(OSError):  # no client waits, or there is no descriptor at present
                self._client, _ = self._listener.accept()
                self._client.setblocking(False)
                self._received = b""
                self._until = self._clock() + ORDER_SECONDS
        if self._client is None or not self._has_line(self._client):
            return None
        try:
            order = msgspec.json.decode(self._received, type=SupervisorOrder)
            wrong = objection(order)
        except msgspec.DecodeError as error:
            wrong = f"not an order: {error}"
        if wrong:
            self.finish(wrong)
            return None
        return order

    def _has_line(self, client: socket.socket) -> bool:
        """Receive what has come; a client that leaves, takes too long or sends too much is disconnected."""
        try:
            received = client.recv(MAX_LINE)
        except BlockingIOError:
            if self._clock() > self._until:
                self._hang_up()
            return False
        except OSError:
            received = b""
        self._received += received
        if not received or len(self._received) > MAX_LINE:
            self._hang_up()
            return False
        return b"\n" in self._received

    def report(self, text: str) -> None:
        """Send a line to the client of the order, if it is still connected."""
        if self._client is not None:
            with contextlib.suppress(OSError):
                self._client.send(f"{text}\n".encode())

    def finish(self, text: str = DONE) -> None:
        self.report(text)
        self._hang_up()

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        self._hang_up()
        self._listener.close()
        if identity(self._path) == self._place:  # else it belongs to another process
            self._path.unlink(missing_ok=True)


def desk_path(runtime_path: Path) -> Path:
    return runtime_path / "serve.sock"


def send_order(path: Path, order: SupervisorOrder, show: Callable[[str], None]) -> bool:
    """Send an order and show the answers; True where it was carried out.  Raises OSError where nothing listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        connection.sendall(msgspec.json.encode(order) + b"\n")
        last = ""
        with connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                last = line.rstrip("\n")
                show(last)
    return last == DONE


def give(settings: DeploymentSettings, order: SupervisorOrder) -> int:
    """Give an order to the deployment that these settings name; returns the command's exit status."""
    path = desk_path(settings.runtime_path)
    try:
        return 0 if send_order(path, order, click.echo) else 1
    except OSError as error:
        click.echo(
            f"pageant: no `pageant serve` runs with runtime directory {settings.runtime_path}: {error.strerror}",
            err=True,
        )
        return 1


class Fulfilment:
    """Carries out the orders that come to a desk, a little between any two polls of the supervisor."""

    def __init__(
        self,
        desk: OrderDesk,
        supervisor: Supervisor,
        is_ready: Callable[[ChildProcess], bool],
        *,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._supervisor = supervisor
        self._is_ready = is_ready
        self._report = report
        self._clock = clock
        self._work: Iterator[None] | None = None
        self._looked = clock()

    def poll(self) -> None:
        if self._clock() - self._looked >= KEEP_SECONDS:
            self._looked = self._clock()
            if said := self._desk.keep():
                self._report(said)
        if self._work is None and (order := self._desk.poll()) is not None:
            self._work = self._carry_out(order)
        if self._work is None:
            return
        try:
            next(self._work)
        except StopIteration:
            self._end(DONE)
        except RestartFailedError as error:
            self._end(str(error))

    def _end(self, text: str) -> None:
        self._work = None
        self._desk.finish(text)

    def _carry_out(self, order: SupervisorOrder) -> Iterator[None]:
        for service, count in order.scale.items():
            self._supervisor.scale(service, count)
        while not all(self._is_settled(service, count) for service, count in order.scale.items()):
            yield
        yield from rolling_restart(self._supervisor, order.restart, self._is_ready, report=self._say, clock=self._clock)

    def _is_settled(self, service: str, count: int) -> bool:
        present = [child for child in self._supervisor.children if child.role.service == service]
        return len(present) == count and all(map(self._is_ready, present))

    def _say(self, text: str) -> None:
        self._report(text)
        self._desk.report(text)
