"""Keys, certificates, ports, directories and files of the settings; and all checks in turn.  Nothing is created."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from engine.description.ranks import why_not_in_torch
from engine.description.stages import why_not_divided
from services.cli.checks.heads import check_brought, check_head
from services.cli.checks.models import CheckpointFacts, Finding, check_draft_model, check_memory, check_model
from services.gateway.access.auth import make_access
from shared.config import Settings
from shared.errors import ConfigError
from shared.exposure import KEYS_ADVICE
from shared.ranks.ray import NEEDS_RAY, has_ray
from shared.transport.directory import fits

LONGEST_INSTANCE = "detokenizer-00000000.sock"
GIB = 1 << 30
FILES = ("record", "record_steps", "status_file")
MAX_PORT = 65535


def examine(
    settings: Settings, log_dir: Path | None = None, *, workers: int = 1, gateways: int = 1
) -> Iterator[Finding]:
    """All findings about a deployment with so many replicas, subject by subject."""
    yield from examine_model(settings, workers=workers)
    if settings.engine.executor == "ray":
        yield Finding("ok", "ray", "the package is installed") if has_ray() else Finding("wrong", "ray", NEEDS_RAY)
    yield from check_access(settings)
    yield from check_ports(settings, gateways)
    yield from check_directories(settings, log_dir)


def examine_model(settings: Settings, *, workers: int = 1) -> Iterator[Finding]:
    """The findings about a model and its draft."""
    finding, facts = check_model(settings.engine.model, "model", settings.engine)
    yield finding
    found, head = None, None
    if facts is not None:
        if settings.speculation.has_head:
            found, head = check_head(settings, facts.spec)
        elif settings.speculation.draft == "off":
            found = check_brought(settings, facts.spec)
        yield from check_ranks(settings, facts)
        if settings.engine.executor != "ray":  # else its memory is that of other nodes
            yield from check_memory(settings, facts, workers=workers, head=head)
    if settings.speculation.draft == "ngram":
        yield Finding("ok", "draft", "prompt lookup")
    elif found is not None:
        yield found
    elif settings.speculation.has_service:
        finding, facts = check_model(settings.speculation.draft, "draft", settings.engine)
        yield finding
        if facts is not None:
            yield from check_draft_model(settings, facts)


def check_ranks(settings: Settings, facts: CheckpointFacts) -> Iterator[Finding]:
    """Whether the model can be cut into as many ranks as are asked for."""
    engine = settings.engine
    stages, ranks = engine.pipeline_parallel_size, engine.tensor_parallel_size
    whole, redundant = engine.enable_expert_parallel, engine.num_redundant_experts
    why = why_not_divided(facts.spec, stages, ranks, whole_experts=whole, redundant=redundant)
    why = why or (why_not_in_torch(facts.spec) if engine.has_torch_ranks else "")
    how = "one behind the other" if engine.has_stages else "together"
    if engine.has_ranked_stages:
        how = f"in {stages} stages, each of {ranks} together"
    if engine.ranks > 1:
        yield Finding("wrong" if why else "ok", "ranks", why or f"{engine.ranks} processes compute the model {how}")


def check_access(settings: Settings) -> Iterator[Finding]:
    """The keys and certificates, as the gateway will read them."""
    try:
        access = make_access(settings.access)
    except ConfigError as error:
        yield Finding("wrong", "keys", str(error))
    else:
        if settings.access.is_open_to_others(settings.gateway.host):
            yield Finding("note", "keys", f"none, at host {settings.gateway.host}: {KEYS_ADVICE}")
        else:
            yield Finding("ok", "keys", "none: any program of this machine may ask" if access.is_open else "needed")
    if settings.access.tls_cert_file and (wrong := _wrong_with_tls(settings)):
        yield Finding("wrong", "tls", wrong)


def _wrong_with_tls(settings: Settings) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    named = f"tls_cert_file {settings.access.tls_cert_file} and tls_key_file {settings.access.tls_key_file}"
    try:
        context.load_cert_chain(settings.access.tls_cert_file, settings.access.tls_key_file, password="")
        named = f"tls_client_ca_file {settings.access.tls_client_ca_file}"
        if settings.access.tls_client_ca_file:
            context.load_verify_locations(settings.access.tls_client_ca_file)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        return f"{named}: {getattr(error, 'strerror', None) or error}"
    return ""


def check_directories(settings: Settings, log_dir: Path | None = None) -> Iterator[Finding]:
    """The runtime directory, and whatever else the settings name."""
    yield check_runtime(settings)
    log = str(log_dir) if log_dir is not None else ""
    wanted = {
        "incident_dir": settings.deployment.incident_dir,
        "files_dir": settings.gateway.files_dir,
        "store_disk": settings.memory.store_disk,
        "--log-dir": log,
    }
    for name, directory in wanted.items():
        if directory and (wrong := why_not_writable(Path(directory))):
            yield Finding("wrong", "directory", f"{name} {directory} cannot be written: {wrong}")
    for name in FILES:
        value = settings.flat()[name]
        if value and (wrong := why_not_a_file(Path(value))):
            yield Finding("wrong", "file", f"{name} {value} cannot be written: {wrong}")


def check_runtime(settings: Settings) -> Finding:
    path = settings.deployment.runtime_path
    if settings.deployment.transport == "ipc" and not fits(f"{path}/{LONGEST_INSTANCE}"):
        return Finding("wrong", "runtime dir", f"{path} is too long for a socket's name; set a shorter --runtime-dir")
    if wrong := why_not_writable(path):
        return Finding("wrong", "runtime dir", f"{path} cannot be written: {wrong}; set --runtime-dir")
    if path.exists():
        status = path.stat()
        if status.st_uid != os.getuid():
            return Finding("wrong", "runtime dir", f"{path} belongs to another user; set --runtime-dir")
        if stat.S_IMODE(status.st_mode) & 0o077:
            return Finding("note", "runtime dir", f"{path} is open to others; it will be closed to them at start")
    free = shutil.disk_usage(_existing(path)).free / GIB
    return Finding("ok", "runtime dir", f"{path}, {free:.1f} GiB free")


def why_not_writable(directory: Path) -> str:
    """Why a directory cannot be made or written to; empty where it can."""
    try:
        existing = _existing(directory)
        if not existing.is_dir():
            return f"{existing} is a file"
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"no permission in {existing}"


def why_not_a_file(path: Path) -> str:
    """Why a file cannot be written; its directory must be there."""
    try:
        if path.is_dir():
            return "it is a directory"
        if path.exists():
            return "" if os.access(path, os.W_OK) else "no permission"
        if not path.parent.exists():
            return f"there is no directory {path.parent}"
    except OSError as error:
        return error.strerror or str(error)
    return why_not_writable(path.parent)


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def check_ports(settings: Settings, gateways: int) -> Iterator[Finding]:
    """Each gateway takes the next port after its neighbour's.  Nothing is kept open."""
    rows = {
        name: range(port, port + gateways) if port > 0 else range(0)
        for name, port in (("port", settings.gateway.port), ("http_port", settings.gateway.http_port))
    }
    if shared := sorted({*rows["port"]} & {*rows["http_port"]}):
        yield Finding("wrong", "port", f"port and http_port are both {shared[0]}; choose another --http-port")
        return
    yield from (_check(settings.gateway.host, port, name) for name, row in rows.items() for port in row)
    if not settings.gateway.port:
        yield Finding("ok", "port", "any free one")
    if settings.deployment.transport == "tcp":
        yield _check("0.0.0.0", settings.deployment.scheduler_port, "scheduler_port")


def _check(host: str, port: int, name: str) -> Finding:
    flag = f"--{name.replace('_', '-')}"
    if port > MAX_PORT:
        return Finding("wrong", "port", f"{name} {port} is above {MAX_PORT}; choose a smaller {flag}")
    if (reason := why_taken(host, port)) is not None:
        return Finding("wrong", "port", f"cannot listen on {host}:{port}: {reason}; choose another {flag}")
    return Finding("ok", "port", f"{host}:{port} is free")


def why_taken(host: str, port: int) -> str | None:
    """Gateways share their port, also with those of another deployment: so it is tried without sharing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except (OSError, UnicodeError) as error:
            return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return None
