"""Run one worker: python -m services.worker"""

import gc

from services.worker.groups.rank_processes import start_early
from shared.processes.exit_status import leave


def main() -> int:
    ranks = start_early()

    gc.disable()  # collections amid an import are a sixth of its time, and find nothing
    from services.worker.main import WorkerLives  # with torch, which takes seconds: the other ranks import it too
    from shared.actor import run_actor

    gc.enable()
    lives = WorkerLives(ranks)
    while lives.goes_on(status := run_actor(lives.make)):
        pass
    return status


if __name__ == "__main__":
    leave(main())
