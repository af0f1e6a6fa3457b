"""Print this host's address in the Ray cluster: python -m services.worker.ray.host

A process of its own, so that no thread of Ray is in `pageant serve`, and nothing that ends it.
"""

from __future__ import annotations

import sys

from services.worker.ray.cluster import connect
from shared.config import load_settings
from shared.errors import FatalError, PageantError
from shared.processes.exit_status import EXIT_CONFIG, EXIT_FATAL


def main() -> int:
    try:
        ray = connect(load_settings())
    except PageantError as error:
        print(error, file=sys.stderr)
        return EXIT_FATAL if isinstance(error, FatalError) else EXIT_CONFIG
    print(ray.util.get_node_ip_address())
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
