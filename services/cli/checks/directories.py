"""Directories and files that a deployment writes.  Nothing is created here."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from services.cli.checks.finding import Finding
from shared.config import DeploymentSettings, ObservationSettings
from shared.transport.directory import fits

LONGEST_INSTANCE = "detokenizer-00000000.sock"
GIB = 1 << 30


def check_directories(
    deployment: DeploymentSettings, observation: ObservationSettings, log_dir: Path | None = None
) -> Iterator[Finding]:
    """The runtime directory, and whatever else the settings name."""
    yield check_runtime(deployment)
    wanted = {"incident_dir": deployment.incident_dir, "--log-dir": str(log_dir) if log_dir is not None else ""}
    for name, directory in wanted.items():
        if directory and (wrong := why_not_writable(Path(directory))):
            yield Finding("wrong", "directory", f"{name} {directory} cannot be written: {wrong}")
    files = {"record": observation.record, "record_steps": observation.record_steps}
    for name, value in (files | {"status_file": deployment.status_file}).items():
        if value and (wrong := why_not_a_file(Path(value))):
            yield Finding("wrong", "file", f"{name} {value} cannot be written: {wrong}")


def check_runtime(settings: DeploymentSettings) -> Finding:
    path = settings.runtime_path
    if settings.transport == "ipc" and not fits(f"{path}/{LONGEST_INSTANCE}"):
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
