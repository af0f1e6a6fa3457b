"""`pageant serve`: all services on one machine, supervised until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from services.cli.addresses import grpc_address, ready_block, with_port
from services.cli.checks import Finding, examine, examine_model
from services.cli.checks.settings import check_runtime
from services.cli.command_line.failures import one_line, words
from services.cli.models.fleet import Fleet, ModelSettings
from services.cli.supervision.cluster import on_cluster
from services.cli.supervision.forking import ForkServers
from services.cli.supervision.orders import Fulfilment, OrderDesk
from services.cli.supervision.processes import Starter
from services.cli.supervision.supervisor import COMPUTING, KILL_AFTER, Replicas, Role, Supervisor
from shared.config import FurtherModel, Settings, settings_of_model
from shared.errors import ConfigError, PageantError
from shared.processes.descriptors import raise_limit
from shared.processes.exit_status import EXIT_CONFIG
from shared.processes.standard_streams import guard_standard_streams
from shared.processes.supervision import desk_path
from shared.transport.directory import claim, make_private

if TYPE_CHECKING:
    from services.cli.display.client import TerminalClient

ONE_OF_EACH = Replicas()
WAITS_SECONDS = 1.0  # between looks at what they wait for
TURN = 0.05  # seconds between looks at the children
FIRST_WORD, NEXT_WORD = 10.0, 30.0  # seconds of starting until missing services are named, and named again


def roles(settings: Settings, replicas: Replicas = ONE_OF_EACH) -> list[Role]:
    """The processes of a deployment, the slowest to start first; drafts and stores where they are not off."""
    counts = {
        "worker": replicas.num_workers,
        "draft": replicas.drafts if settings.speculation.has_service else 0,
        "store": replicas.stores if settings.memory.store_memory else 0,
        "scheduler": 1,
        "tokenizer": replicas.tokenizers,
        "detokenizer": replicas.detokenizers,
        "gateway": replicas.gateways,
    }
    return [Role(service, index) for service, count in counts.items() for index in range(count)]


def serve(
    settings: Settings,
    cast: list[Role],
    log_dir: Path | None,
    models: Sequence[FurtherModel] = (),
    worker_roles: Sequence[str] = (),
    fork_servers: ForkServers | None = None,
) -> int:
    """Run until SIGTERM or Ctrl-C, or until a service says that it cannot work; returns the exit status.

    `cast`: the first model's processes, and those that all share; `models`: the others; `worker_roles`: of the first
    model's workers, by index; of those beyond, the settings'; `fork_servers`: what forks services."""
    try:
        settings = on_cluster(settings)
    except PageantError as error:
        report(str(error))
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    wrong = why_not(settings, cast, log_dir)
    for model in models:
        its = settings_of_model(settings, model)
        wrong = wrong or wrong_with([*examine_model(its, workers=model.workers), check_runtime(its)])
    if wrong is not None:
        report(wrong)
        return EXIT_CONFIG
    guard_standard_streams()
    settings = with_port(settings)
    raise_limit()
    if fork_servers is not None and settings.engine.executor == "ray":
        fork_servers.with_torch.close()  # its workers are elsewhere
    stopped = Interruption()
    own = ModelSettings(settings, worker_roles)
    starter = Starter(settings, log_dir, own.of, fork_servers)
    supervisor = Supervisor(cast, starter, report=report, patience=settings.deployment.handover_timeout + KILL_AFTER)
    desk = OrderDesk(desk_path(settings.deployment.runtime_path))
    fleet = Fleet(own, supervisor, starter, report=report)
    fulfilment = Fulfilment(desk, supervisor, starter.is_ready, report=report)
    fulfilment.model_orders = fleet.carry_out
    progress = JoinProgress(supervisor, starter, fulfilment.say)
    if not settings.memory.store_memory:
        fulfilment.unable = {"store": "store_memory is 0, so a store could keep nothing"}

    def look() -> None:
        fulfilment.poll()
        progress.poll()
        if not fulfilment.is_replacing:
            fleet.poll()

    try:
        counts = {service: sum(role.service == service for role in cast) for service in COMPUTING}
        fleet.begin(counts, list(models))
        supervisor.start()
        watch_until_ready(supervisor, settings, stopped, look, progress)
        while not (stopped.requested or supervisor.failure):
            supervisor.poll()
            look()
            time.sleep(TURN)
    finally:
        desk.close()
        supervisor.stop(settings.deployment.drain_timeout)
    if supervisor.failure:
        role, status = supervisor.failure
        report(f"{role.name} cannot work with this configuration: {one_line(starter.last_words(role))}")
        return status
    return 0


def why_not(settings: Settings, cast: list[Role], log_dir: Path | None) -> str | None:
    """What keeps this deployment from being started, before any process of it is."""
    workers, gateways = (sum(role.service == service for role in cast) for service in ("worker", "gateway"))
    findings = examine(settings, log_dir, workers=workers, gateways=gateways)
    if (wrong := wrong_with(findings)) is not None:
        return wrong
    try:
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        make_private(settings.deployment.runtime_path)
        if settings.deployment.transport == "ipc":
            claim(settings.deployment.runtime_path).close()  # before they meet the processes of another deployment
    except (ConfigError, OSError) as error:
        return words(error)
    return None


def wrong_with(findings: Iterable[Finding]) -> str | None:
    wrong = next((found for found in findings if found.verdict == "wrong"), None)
    return None if wrong is None else f"{wrong.text} (`pageant doctor` checks everything)"


def watch_until_ready(
    supervisor: Supervisor, settings: Settings, stopped: Interruption, look: Callable[[], None], progress: JoinProgress
) -> None:
    """Look after the children until all have joined, and say so; `look`: what else is done meanwhile."""
    client = connect(settings)

    def is_over() -> bool:
        look()
        return progress.is_over()

    try:
        if wait_until_serving(client, supervisor, lambda: stopped.requested, is_over):
            report(ready_block(settings), prefix="")
    finally:
        client.close()


class JoinProgress:
    """Says of the children which has not joined the others yet, now and then, and once of each what it waits for before
    it can begin."""

    def __init__(
        self,
        supervisor: Supervisor,
        starter: Starter,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say`: to the log, and to the client of an order."""
        self._supervisor = supervisor
        self._starter = starter
        self._say = say
        self._clock = clock
        self._told: dict[str, str] = {}  # what it waits for, by role
        self._next_look = clock()
        self._next_word = clock() + FIRST_WORD

    def poll(self) -> None:
        """Look what they wait for."""
        if self._clock() < self._next_look:
            return
        self._next_look = self._clock() + WAITS_SECONDS
        for child in self._supervisor.children:
            name, words = child.role.name, self._starter.waits_for(child)
            if words and words != self._told.get(name):
                self._say(f"{name} waits for a place: {one_line(words)}")
            self._told[name] = words

    def is_over(self) -> bool:
        """Whether every child has joined the others, but for those that wait for a place."""
        starter = self._starter
        missing = [
            child.role.name
            for child in self._supervisor.children
            if not (starter.is_ready(child) or starter.waits_for(child))
        ]
        if missing and self._clock() >= self._next_word:
            self._next_word = self._clock() + NEXT_WORD
            report(f"still starting: {', '.join(missing)}")
        return not missing


def wait_until_serving(
    client: TerminalClient,
    supervisor: Supervisor,
    given_up: Callable[[], bool],
    all_there: Callable[[], bool] = lambda: True,
) -> bool:
    """Look after the children until the gateway serves; False where they cannot work or the caller gives up."""
    while not (given_up() or supervisor.failure):
        if all_there() and client.serving:
            return True
        supervisor.poll()
        time.sleep(TURN / 2)
    return False


def connect(settings: Settings) -> TerminalClient:
    """A client for a gateway with these settings.  gRPC is imported here, while the children already start."""
    from services.cli.display.client import TerminalClient

    authority = None
    if settings.access.tls_cert_file:
        with contextlib.suppress(OSError):  # the gateway itself says what is wrong with it
            authority = Path(settings.access.tls_cert_file).read_bytes()
    return TerminalClient(grpc_address(settings.gateway), authority=authority)


class Interruption:
    """Remembers SIGTERM and SIGINT instead of being interrupted by them."""

    def __init__(self) -> None:
        self.requested = False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def report(text: str, *, prefix: str = "pageant: ") -> None:
    with contextlib.suppress(OSError):  # the reader may have gone; what is served goes on
        click.echo(f"{prefix}{text}", err=True)
