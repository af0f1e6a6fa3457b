"""What can be known before a process starts: `pageant doctor` prints it, `pageant serve` refuses what is wrong.

Nothing here imports torch or takes longer than a few milliseconds, but for a model that must be asked for at the hub.
"""

from __future__ import annotations

from services.cli.checks.everything import Cast, examine
from services.cli.checks.finding import Finding

__all__ = ["Cast", "Finding", "examine"]
