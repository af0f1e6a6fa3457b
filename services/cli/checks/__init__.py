"""What can be known before a process starts: `pageant doctor` prints it, `pageant serve` refuses what is wrong.

Nothing here imports torch or takes longer than a few milliseconds, but for a model that must be asked for at the hub.
"""

from __future__ import annotations

from services.cli.checks.models import Finding
from services.cli.checks.settings import examine, examine_model

__all__ = ["Finding", "examine", "examine_model"]
