"""What the exit statuses of Pageant's processes mean, to supervisors and to scripts."""

from __future__ import annotations

EXIT_FATAL = 70  # EX_SOFTWARE: the supervisor starts a new instance; of a command: a defect
EXIT_CONFIG = 78  # EX_CONFIG: starting again would not help
EXIT_INTERRUPTED = 130  # 128 + SIGINT
