"""The exit statuses of every command."""

from __future__ import annotations

import signal

EXIT_DEFECT = 70  # EX_SOFTWARE
EXIT_CONFIG = 78  # EX_CONFIG
EXIT_INTERRUPTED = 128 + signal.SIGINT
