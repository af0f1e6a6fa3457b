"""`pageant rank`: one rank of a worker that another host leads, started again whenever its group ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from services.cli.serve import TURN, Interruption, report
from services.cli.supervision.processes import start
from services.cli.supervision.supervisor import Role, Supervisor
from shared.config import Settings, settings_environment
from shared.processes.descriptors import raise_limit

MAX_DELAY = 2.0  # seconds before it is started again: its leader may be back by then


def keep_rank(settings: Settings, address: str, number: int | None) -> int:
    """Until SIGTERM or Ctrl-C, or until the leader refuses it for good; returns the exit status."""
    raise_limit()
    stopped = Interruption()
    words = [address] if number is None else [address, str(number)]
    environment = os.environ | settings_environment(settings)

    def begin(_: Role) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-m", "services.worker.hosts", *words], environment)

    role = Role("rank", number or 0)
    supervisor = Supervisor([role], begin, report=report, max_delay=MAX_DELAY)
    try:
        supervisor.start()
        while not (stopped.requested or supervisor.failure):
            supervisor.poll()
            time.sleep(TURN)
    finally:
        supervisor.stop(0.0)
    if supervisor.failure:
        report("this rank cannot work; its last line above says why")
        return supervisor.failure[1]
    return 0
