"""`pageant serve`: the whole troupe on one machine, supervised until it is told to stop."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
import msgspec

from services.cli.orders import Fulfilment, OrderDesk, desk_path
from services.cli.processes import Starter
from services.cli.supervisor import KILL_AFTER, Role, Supervisor
from shared.actor.process import EXIT_CONFIG
from shared.config import Settings
from shared.errors import ConfigError
from shared.transport.unix import claim, make_private

if TYPE_CHECKING:
    from services.cli.client import Client

TURN = 0.05  # seconds between looks at the children
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}


def roles(
    settings: Settings,
    *,
    workers: int = 1,
    drafts: int = 1,
    tokenizers: int = 1,
    detokenizers: int = 1,
    gateways: int = 1,
) -> list[Role]:
    """Who is needed, the slowest to start first; drafts only where they are not off."""
    counts = {
        "worker": workers,
        "draft": 0 if settings.draft == "off" else drafts,
        "scheduler": 1,
        "tokenizer": tokenizers,
        "detokenizer": detokenizers,
        "gateway": gateways,
    }
    return [Role(service, index) for service, count in counts.items() for index in range(count)]


def serve(settings: Settings, cast: list[Role], log_dir: Path | None) -> int:
    """Run until SIGTERM or Ctrl-C, or until a service says that it cannot work; returns the exit status."""
    if (wrong := taken(settings)) is not None:
        report(wrong)
        return EXIT_CONFIG
    settings = with_port(settings)
    stopped = Interruption()
    starter = Starter(settings, log_dir)
    supervisor = Supervisor(cast, starter, report=report, patience=settings.handover_timeout + KILL_AFTER)
    supervisor.start()
    desk = OrderDesk(desk_path(settings.runtime_path))
    fulfilment = Fulfilment(desk, supervisor, starter.is_ready, report=report)
    try:
        watch_until_ready(supervisor, settings, stopped)
        while not (stopped.requested or supervisor.failure):
            supervisor.poll()
            fulfilment.poll()
            time.sleep(TURN)
    finally:
        desk.close()
        supervisor.stop(settings.drain_timeout)
    if supervisor.failure:
        role, status = supervisor.failure
        report(f"{role.name} cannot work with this configuration: {starter.last_words(role)}")
        return status
    return 0


def taken(settings: Settings) -> str | None:
    """Why this deployment cannot have its runtime directory, before any process of it meets those of another."""
    if settings.transport == "ipc":
        try:
            make_private(settings.runtime_path)
            claim(settings.runtime_path).close()
        except ConfigError as error:
            return str(error)
    return next((wrong for port in (settings.port, settings.http_port) if (wrong := port_taken(settings, port))), None)


def port_taken(settings: Settings, port: int) -> str | None:
    """Why a gateway cannot have a port; gateways share theirs, and would do so with another deployment's."""
    if port <= 0:
        return None
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host.strip("[]"), port))
        except OSError as error:
            return f"cannot listen on {settings.host}:{port}: {error.strerror}"
    return None


def watch_until_ready(supervisor: Supervisor, settings: Settings, stopped: Interruption) -> None:
    client = connect(settings)
    try:
        if wait_until_serving(client, supervisor, lambda: stopped.requested):
            click.echo(f"ready: {settings.model_name} at {client.address}{http_address(settings)}", err=True)
    finally:
        client.close()


def wait_until_serving(client: Client, supervisor: Supervisor, given_up: Callable[[], bool]) -> bool:
    """Look after the children until the gateway serves; False where they cannot work or the caller gives up."""
    while not (given_up() or supervisor.failure):
        if client.serving:
            return True
        supervisor.poll()
        time.sleep(TURN / 2)
    return False


def connect(settings: Settings) -> Client:
    """A client for a gateway with these settings.  gRPC is imported here, while the children already start."""
    from services.cli.client import Client

    address = f"{WILDCARDS.get(settings.host, settings.host)}:{settings.port}"
    authority = None
    if settings.tls_cert_file:
        with contextlib.suppress(OSError):  # the gateway itself says what is wrong with it
            authority = Path(settings.tls_cert_file).read_bytes()
    return Client(address, authority=authority)


def http_address(settings: Settings) -> str:
    """Where browsers and HTTP clients find the gateway, if they do."""
    if settings.http_port < 0:
        return ""
    return f", http://{WILDCARDS.get(settings.host, settings.host)}:{settings.http_port}"


def with_port(settings: Settings) -> Settings:
    """A port of 0 becomes a free one, known before the gateway is."""
    free = {name: free_port() for name in ("port", "http_port") if getattr(settings, name) == 0}
    return msgspec.structs.replace(settings, **free)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Interruption:
    """Remembers SIGTERM and SIGINT instead of being interrupted by them."""

    def __init__(self) -> None:
        self.requested = False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def report(text: str) -> None:
    click.echo(f"pageant: {text}", err=True)
