"""Whether Ray, which places ranks with executor=ray, is installed.  It is not imported here."""

from __future__ import annotations

import importlib.util

NEEDS_RAY = "executor=ray needs the package ray: pip install 'pageant[ray]'"


def has_ray() -> bool:
    """A directory of that name, as Ray leaves in /tmp, is no package."""
    found = importlib.util.find_spec("ray")
    return found is not None and found.origin is not None
