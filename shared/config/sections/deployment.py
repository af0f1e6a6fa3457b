"""Where the services find each other, and how long they wait for each other."""

import os
from pathlib import Path
from typing import Annotated, Literal

from shared.config.section import Section, advanced, common


class DeploymentSettings(Section, frozen=True, kw_only=True):
    TITLE = "Deployment"
    transport: Annotated[
        Literal["ipc", "tcp"],
        advanced("ZeroMQ's sockets between the services: ipc on one host, tcp (encrypted) across hosts."),
    ] = "ipc"
    runtime_dir: Annotated[
        str, common("Directory (mode 0700) of the deployment's sockets and keys. Empty: a directory per user.")
    ] = ""
    scheduler_host: Annotated[str, advanced("With tcp: the scheduler's host.")] = "127.0.0.1"
    scheduler_port: Annotated[int, advanced("With tcp: the scheduler's port.")] = 5550
    advertise_host: Annotated[
        str,
        advanced(
            "With tcp: the host at which others reach this service. Empty: its address on the scheduler's network."
        ),
    ] = ""
    rank_port: Annotated[
        int,
        advanced(
            "Port at which a worker waits for the ranks that join it (executor=hosts); each further worker of one "
            "`pageant serve` takes the next. 0: any that is free."
        ),
    ] = 5560
    ray_address: Annotated[
        str,
        advanced(
            "With executor=ray: HOST:PORT of the cluster's head. Empty: RAY_ADDRESS, or the cluster that this host "
            "is a node of."
        ),
    ] = ""
    ray_placement: Annotated[
        Literal["pack", "spread", "strict_pack", "strict_spread"],
        advanced(
            "With executor=ray: on which nodes the ranks of one worker are. pack, spread: on few or on many, where "
            "that can be; strict_pack: on one; strict_spread: each on its own."
        ),
    ] = "pack"
    heartbeat_interval: Annotated[float, advanced("Seconds between two heartbeats of a service.")] = 0.5
    heartbeat_timeout: Annotated[
        float, advanced("Seconds of silence after which a service is given up, an interval later at most.")
    ] = 2.5
    resume_timeout: Annotated[
        float, advanced("Seconds that a stream waits for the return of a service before it ends.")
    ] = 30.0
    drain_timeout: Annotated[
        float, advanced("Seconds that open streams have to end when all services stop (SIGTERM).")
    ] = 5.0
    handover_timeout: Annotated[
        float, advanced("Seconds that they have when one service leaves and another replaces it (SIGUSR1).")
    ] = 60.0
    worker_role: Annotated[
        Literal["both", "prefill", "decode"],
        advanced(
            "What this worker is for: prefill computes the full blocks of prompts, decode fetches them, computes the "
            "rest and samples. Where no worker has a role, the others do its work."
        ),
    ] = "both"
    status_file: Annotated[
        str, advanced("File that says READY while the service is well, for container health checks.")
    ] = ""
    stall_timeout: Annotated[
        float,
        advanced(
            "Seconds without progress while work waits, until health checks say STALLED. Where steps are long, a long "
            "step is no stall."
        ),
    ] = 5.0
    reconcile_interval: Annotated[
        float,
        advanced(
            "Seconds between two comparisons of the scheduler's and the workers' rows and blocks; leaks are reclaimed."
        ),
    ] = 5.0
    incident_dir: Annotated[
        str,
        advanced(
            "Directory of a file for each stall and fatal error: stacks, state and last log lines, no prompts or "
            "outputs. Empty: incidents in runtime_dir."
        ),
    ] = ""
    max_incidents: Annotated[int, advanced("Incident files that are kept of each service.")] = 8

    @property
    def incident_path(self) -> Path:
        """Where incidents are written; not created here."""
        return Path(self.incident_dir) if self.incident_dir else self.runtime_path / "incidents"

    @property
    def runtime_path(self) -> Path:
        """The private directory of this deployment's sockets and keys; not created here."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/pageant-{os.getuid()}") / "pageant"
