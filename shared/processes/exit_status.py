"""What exit statuses mean, to supervisors and to scripts; and how processes end that have torch."""

from __future__ import annotations

import atexit
import os
from typing import NoReturn

from shared.processes.idle_time import give_way_everywhere

EXIT_FATAL = 70  # EX_SOFTWARE: the supervisor starts a new instance; of a command: a defect
EXIT_CONFIG = 78  # EX_CONFIG: starting again would not help
NICENESS = 10  # of a process that ends: a tenth of a core that others want
EXIT_INTERRUPTED = 130  # 128 + SIGINT


def leave(status: int) -> NoReturn:
    """End the process, with what is to be done at its end, but without the interpreter's own: that takes torch apart,
    which costs 0.4 s of a core beside the streams that go on in other processes.  That the kernel takes its memory back
    gives way to these too."""
    atexit._run_exitfuncs()
    give_way_everywhere(NICENESS)
    os._exit(status)
