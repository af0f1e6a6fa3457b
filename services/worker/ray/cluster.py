"""The way to Ray: its cluster, and the places of one group in it."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from services.worker.ray.needs import rank_needs, shortage, totals
from shared.config import Settings
from shared.errors import ConfigError, FatalError
from shared.ranks.ray import NEEDS_RAY

CONNECT_SECONDS = 5.0
LOOK_SECONDS = 1.0  # for which Ray is asked at a time: signals are answered in between


def connect(settings: Settings) -> Any:
    """The module `ray`, connected to the cluster.

    Raises ConfigError where the package is not installed, FatalError where no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(NEEDS_RAY) from error
    address = settings.deployment.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    _probe(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # of many types, by where it fails
        raise FatalError(f"Ray at {address} cannot be joined: {_first_line(error)}") from error
    return ray


def _probe(address: str) -> None:
    """Ray itself takes more than a minute to give up an address where nothing listens."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise FatalError(f"no Ray cluster answers at {address} (ray_address): {error}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class Places:
    """One placement group: a bundle for each rank."""

    def __init__(self, settings: Settings) -> None:
        """Asks for them.  Raises FatalError where Ray does not take that."""
        from ray.util.placement_group import placement_group

        self._needs = rank_needs(settings.engine)
        self._ranks = settings.engine.ranks
        self._strategy = settings.deployment.ray_placement
        try:
            self.group: Any = placement_group([self._needs] * self._ranks, strategy=self._strategy.upper())
        except Exception as error:
            raise FatalError(f"Ray does not take what is asked for: {_first_line(error)}") from error

    def are_there(self) -> bool:
        """Waits for them, a little at a time."""
        try:
            return bool(self.group.wait(LOOK_SECONDS))
        except Exception as error:
            raise FatalError(f"Ray has not placed this worker: {_first_line(error)}") from error

    def lack(self) -> str:
        """Which resource is missing, as far as Ray says."""
        import ray

        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            free = ray.available_resources()
        except Exception as error:
            return f"Ray does not say what it has: {_first_line(error)}"
        return shortage(self._needs, self._ranks, self._strategy, totals(nodes), free, len(nodes))

    def actor(self, rank: int) -> Any:
        """An actor at a rank's place.  Where Ray starts it again it would have lost its process: so never."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from services.worker.ray.placed import PlacedRank

        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)
        options: Any = ray.remote(PlacedRank)
        return options.options(
            num_cpus=self._needs["CPU"],
            num_gpus=self._needs.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=0,
            max_task_retries=0,
        ).remote()

    def give_back(self) -> None:
        """What runs there is ended by Ray."""
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):  # Ray may be gone
            remove_placement_group(self.group)
