"""`pageant doctor`: what was found on this machine, and what would keep it from serving, in words that help."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from shared.config import Settings, settings_environment

PACKAGES = {"torch": "worker", "safetensors": "worker", "tokenizers": "tokenizer", "jinja2": "tokenizer"}
OLDEST_PYTHON = (3, 11)
MAX_SOCKET_NAME = 107  # of a Unix socket's path, with its scheme
LONGEST_INSTANCE = len("detokenizer-00000000.sock")
COLORS = {"ok": "green", "note": "yellow", "wrong": "red"}
PLAN_TIMEOUT = 300.0  # the native kernels may have to be compiled
GIB = 1 << 30


class Finding(msgspec.Struct, frozen=True):
    """`wrong` keeps this machine from serving; a `note` does not."""

    verdict: Literal["ok", "note", "wrong"]
    subject: str
    text: str


def doctor(settings: Settings) -> int:
    """Print every finding; 1 where something is wrong."""
    wrong = 0
    for finding in examine(settings):
        wrong += finding.verdict == "wrong"
        mark = click.style(f"{finding.verdict:5}", fg=COLORS[finding.verdict])
        click.echo(f"{mark}  {finding.subject:12}  {finding.text}")
    click.echo("ready to serve" if not wrong else f"{wrong} to put right before `pageant serve` can work")
    return 1 if wrong else 0


def examine(settings: Settings) -> Iterator[Finding]:
    yield check_python()
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    yield from (missing_package(name) for name in missing)
    yield from check_model(settings.model)
    yield from check_draft(settings.draft)
    if "torch" not in missing:
        yield from check_plan(ask_plan(settings))
    yield check_port(settings.host, settings.port)
    yield check_runtime(settings)


def check_python() -> Finding:
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        return Finding("wrong", "python", f"{version}; 3.11 or newer is needed")
    return Finding("ok", "python", f"{version} at {sys.executable}")


def missing_package(name: str) -> Finding:
    return Finding("wrong", name, f"not installed; pip install 'pageant[{PACKAGES[name]}]'")


def check_draft(draft: str) -> Iterator[Finding]:
    if draft == "ngram":
        yield Finding("ok", "draft", "prompt lookup")
    elif draft != "off":
        yield from (msgspec.structs.replace(finding, subject="draft") for finding in check_model(draft))


def check_model(model: str) -> Iterator[Finding]:
    directory = Path(model).expanduser()
    if not directory.is_dir():
        if directory.is_absolute() or model.count("/") != 1 or model.startswith((".", "models/")):
            yield Finding("wrong", "model", f"{model} is no directory; name one with -m, or a repository of the hub")
        else:
            yield Finding("note", "model", f"{model} is no directory here; it would be downloaded from the hub")
        return
    absent = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    weights = list(directory.glob("*.safetensors"))
    if not weights:
        absent.append("*.safetensors")
    if absent:
        yield Finding("wrong", "model", f"{directory} lacks {', '.join(absent)}")
    else:
        size = sum(path.stat().st_size for path in weights)
        yield Finding("ok", "model", f"{directory}: {_architecture(directory)}, {size / 1e6:.1f} MB of weights")


def _architecture(directory: Path) -> str:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "config.json cannot be read"
    return ", ".join(config.get("architectures") or ["no architecture named"])


def ask_plan(settings: Settings) -> dict[str, Any]:
    """The worker's own plan, from a process of its own: only that one imports torch."""
    command = [sys.executable, "-m", "services.worker.plan"]
    environment = os.environ | settings_environment(settings) | {"HF_HUB_OFFLINE": "1"}  # looks, never downloads
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PLAN_TIMEOUT, check=False
        )
        plan = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"no memory plan within {PLAN_TIMEOUT:g} s"}
    except ValueError:
        return {"error": (done.stderr.strip().splitlines() or ["the worker's plan said nothing"])[-1]}
    return plan if isinstance(plan, dict) else {"error": "the worker's plan is no object"}


def check_plan(plan: dict[str, Any]) -> Iterator[Finding]:
    if "device" in plan:
        yield Finding("ok", "device", f"{plan['device']} ({plan['device_name']}), torch {plan['torch']}")
    if "error" in plan:
        yield Finding("wrong", "memory", " ".join(str(plan["error"]).split()))
        return
    yield check_kernels(plan)
    longest = plan["max_model_len"]
    yield Finding(
        "ok",
        "memory",
        f"{plan['bytes'] / GIB:.2f} GiB of KV cache: {plan['num_blocks']} blocks of "
        f"{plan['block_size']} tokens hold {plan['num_tokens']} tokens, "
        f"{plan['num_tokens'] / longest:.1f} requests of max_model_len={longest}",
    )


def check_kernels(plan: dict[str, Any]) -> Finding:
    if plan["lack"]:
        return Finding("note", "kernels", f"torch, several times slower than the native ones: {plan['lack']}")
    return Finding("ok", "kernels", f"{plan['kernels']}, {plan['num_threads']} threads; {plan['formats']}")


def check_port(host: str, port: int) -> Finding:
    if not port:
        return Finding("ok", "port", "any free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return Finding("wrong", "port", f"{host}:{port} cannot be used: {error.strerror}; choose another --port")
    return Finding("ok", "port", f"{host}:{port} is free")


def check_runtime(settings: Settings) -> Finding:
    path = settings.runtime_path
    if len(f"ipc://{path}/") + LONGEST_INSTANCE > MAX_SOCKET_NAME:
        return Finding("wrong", "runtime dir", f"{path} is too long for a socket's name; set a shorter --runtime-dir")
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    status = existing.stat()
    if not os.access(existing, os.W_OK):
        return Finding("wrong", "runtime dir", f"{existing} cannot be written; set --runtime-dir")
    if existing == path and status.st_uid != os.getuid():
        return Finding("wrong", "runtime dir", f"{path} belongs to another user; set --runtime-dir")
    if existing == path and stat.S_IMODE(status.st_mode) & 0o077:
        return Finding("note", "runtime dir", f"{path} is open to others; it will be closed to them at start")
    free = shutil.disk_usage(existing).free / GIB
    return Finding("ok", "runtime dir", f"{path}, {free:.1f} GiB free")
