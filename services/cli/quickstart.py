"""`pageant quickstart`: a private troupe for one completion, gone when it is done."""

from __future__ import annotations

import sys
from typing import Any

from services.cli.private import with_private_troupe
from services.cli.serve import connect
from shared.config import Settings


def quickstart(settings: Settings, prompt: str, sampling: dict[str, Any]) -> int:
    """Start, stream one completion with its figures, shut down; returns the exit status."""

    def work(private: Settings) -> int:
        from services.cli import terminal

        terminal.write(prompt if sys.stdout.isatty() else "")
        return terminal.generate(connect(private), prompt, sampling)

    return with_private_troupe(settings, work)
