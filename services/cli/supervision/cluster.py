"""Where `pageant serve` is in a Ray cluster, before it starts anything."""

from __future__ import annotations

import os
import subprocess
import sys

from services.cli.command_line.failures import one_line
from shared.config import Settings, settings_environment
from shared.errors import ConfigError, FatalError
from shared.ranks.ray import NEEDS_RAY, has_ray

LOCAL = "127.0.0.1"
SECONDS = 60.0  # that Ray has to answer


def on_cluster(settings: Settings) -> Settings:
    """With executor=ray, the settings under which workers of other nodes find this host; others as they are.

    Raises ConfigError where Ray is not installed, and FatalError where no cluster answers.
    """
    if settings.engine.executor != "ray":
        return settings
    if not has_ray():
        raise ConfigError(NEEDS_RAY)
    host = settings.deployment.scheduler_host
    own = _own_host(settings)
    return settings.replace(transport="tcp", scheduler_host=own if host == LOCAL else host)


def _own_host(settings: Settings) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "services.worker.ray.host"],
            env=os.environ | settings_environment(settings),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FatalError(f"Ray has not answered within {SECONDS:g} s") from error
    said = done.stdout.split()
    if done.returncode or not said:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise FatalError(one_line(lines[-1]) if lines else f"Ray's answer ended with status {done.returncode}")
    return said[-1].decode()
