"""Orders to a running `pageant serve`: the desk that takes them, and the work that carries them out."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import click
import msgspec

from services.cli.supervision.supervisor import ChildProcess, OrderFailedError, Supervisor, rolling_restart
from shared.config import DeploymentSettings
from shared.errors import ConfigError
from shared.processes.supervision import (
    ACCEPTED,
    BUSY,
    DONE,
    MAX_LINE,
    ModelOrder,
    ProcessReport,
    SupervisionReport,
    SupervisorOrder,
    desk_path,
    objection,
)
from shared.transport.directory import answers, identity, listening, make_private

ORDER_SECONDS = 5.0  # that a client has to send its order
KEEP_SECONDS = 0.5  # between checks of the socket's path
MAX_CLIENTS = 32  # that are read from at once; others wait to be let in
SCALE_SECONDS = 180.0  # that an order to scale keeps the next ones waiting
MAX_ORDERS = 8  # that wait for the one in hand


class DeskClient:
    """A connection to the desk.  The client may leave at any time."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._until = until
        self.received = b""
        self.has_left = False

    def has_line(self, now: float) -> bool:
        """Receive what has come; a client that leaves, takes too long or sends too much is disconnected."""
        try:
            received = self._connection.recv(MAX_LINE)
        except BlockingIOError:
            if now > self._until:
                self.hang_up()
            return False
        except OSError:
            received = b""
        self.received += received
        if not received or len(self.received) > MAX_LINE:
            self.hang_up()
            return False
        return b"\n" in self.received

    def tell(self, text: str) -> None:
        """Send a line, if it is still connected."""
        if not self.has_left:
            with contextlib.suppress(OSError):
                self._connection.send(f"{text}\n".encode())

    def hang_up(self) -> None:
        self._connection.close()
        self.has_left = True


class OrderDesk:
    """Takes orders whenever `poll` is called and hands them out one at a time; questions are answered at once."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        path.unlink(missing_ok=True)
        self._listener = listening(path)
        self._place = identity(path)
        self._trouble = ""
        self._reading: list[DeskClient] = []  # they have not said yet what they want
        self._orders: deque[tuple[SupervisorOrder, DeskClient]] = deque()
        self._client: DeskClient | None = None  # whose order is in hand

    @property
    def num_waiting(self) -> int:
        return len(self._orders)

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
        return f"{self._path.parent} was deleted or replaced: the socket for orders was made again"

    def _complain(self, text: str) -> str:
        """The text, unless it is the same as before."""
        is_new, self._trouble = text != self._trouble, text
        return text if is_new else ""

    def poll(self, describe: Callable[[], SupervisionReport] = SupervisionReport) -> SupervisorOrder | None:
        """The next order, if none is in hand; `report` and `finish` answer it.  `describe` answers questions."""
        self._let_in()
        reading, self._reading = self._reading, []
        for client in reading:
            if client.has_line(self._clock()):
                self._hear(client, describe)
            elif not client.has_left:
                self._reading.append(client)
        if self._client is not None or not self._orders:
            return None
        order, self._client = self._orders.popleft()
        return order

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):  # no client waits, or there is no descriptor at present
            while len(self._reading) < MAX_CLIENTS:
                connection, _ = self._listener.accept()
                self._reading.append(DeskClient(connection, self._clock() + ORDER_SECONDS))

    def _hear(self, client: DeskClient, describe: Callable[[], SupervisionReport]) -> None:
        try:
            order = msgspec.json.decode(client.received, type=SupervisorOrder)
        except msgspec.DecodeError as error:
            answer = f"not an order: {error}"
        else:
            if order.report:
                answer = msgspec.json.encode(describe()).decode()
            elif not (answer := objection(order)):
                if len(self._orders) < MAX_ORDERS:
                    self._orders.append((order, client))
                    if order.wait:
                        return
                    answer = ACCEPTED
                else:
                    answer = f"{BUSY}: {len(self._orders)}"
        client.tell(answer)
        client.hang_up()

    def report(self, text: str) -> None:
        """Send a line to the client of the order in hand, if it is still connected."""
        if self._client is not None:
            self._client.tell(text)

    def finish(self, text: str = DONE) -> None:
        """The order in hand is done with."""
        self.report(text)
        if self._client is not None:
            self._client.hang_up()
            self._client = None

    def close(self) -> None:
        self.finish("pageant serve ends")
        for client in (*self._reading, *(client for _, client in self._orders)):
            client.hang_up()
        self._listener.close()
        if identity(self._path) == self._place:  # else it belongs to another process
            self._path.unlink(missing_ok=True)


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


def give(settings: DeploymentSettings, order: SupervisorOrder, show: Callable[[str], None] = click.echo) -> int:
    """Give an order to the deployment that these settings name; returns the command's exit status."""
    path = desk_path(settings.runtime_path)
    try:
        return 0 if send_order(path, order, show) else 1
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
        self.unable: Mapping[str, str] = {}  # by service of which this deployment can have none: why
        self.model_orders: Callable[[ModelOrder, Callable[[str], None]], Iterator[None]] | None = None
        self._desk = desk
        self._supervisor = supervisor
        self._is_ready = is_ready
        self._report = report
        self._clock = clock
        self._work: Iterator[None] | None = None
        self._order: SupervisorOrder | None = None
        self._failed = ""
        self._begun: WeakSet[Any] = WeakSet()  # processes that have been ready
        self._looked = clock()

    def poll(self) -> None:
        if self._clock() - self._looked >= KEEP_SECONDS:
            self._looked = self._clock()
            if said := self._desk.keep():
                self._report(said)
        if (order := self._desk.poll(self.describe)) is not None:
            self._order, self._work, self._failed = order, self._carry_out(order), ""
        if self._work is None:
            return
        try:
            next(self._work)
        except StopIteration:
            self._end(DONE)
        except OrderFailedError as error:
            self._failed = str(error)
            self._report(self._failed)
            self._end(self._failed)

    def describe(self) -> SupervisionReport:
        """How the processes do now."""
        return SupervisionReport(
            [self._describe(child) for child in self._supervisor.children],
            order=str(self._order or ""),
            num_waiting=self._desk.num_waiting,
            failed=self._failed,
        )

    def _describe(self, child: ChildProcess) -> ProcessReport:
        if not child.alive:
            state = "down"
        elif child.is_leaving:
            state = "leaving"
        elif self._is_ready(child):
            state = "ready"
            self._begun.add(child.process)
        else:
            state = "unready" if child.process in self._begun else "starting"
        seconds = round(self._clock() - child.started, 1)
        return ProcessReport(child.role.service, child.role.index, state, child.pid, seconds, child.num_deaths)

    def _end(self, text: str) -> None:
        self._work = self._order = None
        self._desk.finish(text)

    @property
    def is_replacing(self) -> bool:
        """Whether an order is carried out that counts on the processes that are there."""
        return self._order is not None and self._order.model is None

    def _carry_out(self, order: SupervisorOrder) -> Iterator[None]:
        if order.model is not None and self.model_orders is not None:
            say = self._desk.report if order.model.action == "list" else self.say
            yield from self.model_orders(order.model, say)
        for service, count in order.scale.items():
            if count and (why := self.unable.get(service)):
                raise OrderFailedError(f"{service}={count}: {why}")
        for service, count in order.scale.items():
            self._supervisor.scale(service, count)
        begun = self._clock()
        while not all(self._is_settled(service, count) for service, count in order.scale.items()):
            if self._clock() - begun > SCALE_SECONDS:
                raise OrderFailedError(f"{order}: not done within {SCALE_SECONDS:g} s; the supervisor goes on trying")
            yield
        yield from rolling_restart(self._supervisor, order.restart, self._is_ready, report=self.say, clock=self._clock)

    def _is_settled(self, service: str, count: int) -> bool:
        children = self._supervisor.children
        present = [child for child in children if child.role.service == service and not child.role.model]
        return len(present) == count and all(map(self._is_ready, present))

    def say(self, text: str) -> None:
        """To the log, and to the client of the order in hand."""
        self._report(text)
        self._desk.report(text)
