"""Run one worker: python -m services.worker"""

import sys
from functools import partial

from services.worker.rank_processes import start_early


def main() -> int:
    ranks = start_early()

    from services.worker.main import make  # with torch, which takes a second: the other ranks import it meanwhile
    from shared.actor import run_actor

    return run_actor(partial(make, ranks=ranks))


if __name__ == "__main__":
    sys.exit(main())
