"""Ports: whether the gateways, and with tcp the scheduler, can listen."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from services.cli.checks.finding import Finding
from shared.config import DeploymentSettings, GatewaySettings

MAX_PORT = 65535


def check_ports(gateway: GatewaySettings, deployment: DeploymentSettings, *, gateways: int = 1) -> Iterator[Finding]:
    """Each gateway takes the next port after its neighbour's.  Nothing is kept open."""
    grpc, http = (_row(port, gateways) for port in (gateway.port, gateway.http_port))
    if shared := sorted({*grpc} & {*http}):
        yield Finding("wrong", "port", f"port and http_port are both {shared[0]}; choose another --http-port")
        return
    for name, row in (("port", grpc), ("http_port", http)):
        yield from (_check(gateway.host, port, name) for port in row)
    if not gateway.port:
        yield Finding("ok", "port", "any free one")
    if deployment.transport == "tcp":
        yield _check("0.0.0.0", deployment.scheduler_port, "scheduler_port")


def _row(port: int, count: int) -> range:
    return range(port, port + count) if port > 0 else range(0)


def _check(host: str, port: int, name: str) -> Finding:
    flag = f"--{name.replace('_', '-')}"
    if port > MAX_PORT:
        return Finding("wrong", "port", f"{name} {port} is above {MAX_PORT}; choose a smaller {flag}")
    if (reason := why_taken(host, port)) is not None:
        return Finding("wrong", "port", f"cannot listen on {host}:{port}: {reason}; choose another {flag}")
    return Finding("ok", "port", f"{host}:{port} is free")


def why_taken(host: str, port: int) -> str | None:
    """Gateways share their port, and would do so with another deployment's: so it is tried without sharing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except (OSError, UnicodeError) as error:
            return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return None
