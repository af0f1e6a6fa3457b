"""The number of this life of the scheduler, and of its links: greater than those of all lives before."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from shared.clocks.epochs import LIMIT, SPAN, follows, life_of

FILE = "scheduler.epoch"  # in the runtime directory
MAX_FORMER = 8
MAX_BYTES = 64  # of the file


def first_number(life: int) -> int:
    """A random number from the lower half of a life's range, so that two processes that take the same life differ."""
    return SPAN * life + secrets.randbelow(SPAN // 2)


class Lives:
    """Keeps the number of the last life in a file, where there is one that can be written.

    Without a file it begins at the first life.  Members that know a greater number send it, and then this life takes
    another that is greater still (`pass_by`).
    """

    def __init__(self, file: Path | None = None, lost: Callable[[str], None] = lambda reason: None) -> None:
        """`lost` is called with the reason when the file cannot be read or written."""
        self._file = file
        self._lost = lost
        self.former: list[int] = []  # that this very life had before
        known = self._read()
        self.epoch = first_number(life_of(known) + 1)
        self.last = self.epoch  # the greatest number given out
        self._keep()

    def next_link(self) -> int:
        self.last += 1
        return self.last

    def pass_by(self, epoch: int) -> bool:
        """A member knows this number.  Where it is greater than all of ours, and can be an earlier life's, take a
        number that is greater still.  Returns whether that was done."""
        if epoch <= self.last or not follows(epoch, self.last) or epoch + SPAN >= LIMIT:
            return False
        self.former = [*self.former, self.epoch][-MAX_FORMER:]
        self.epoch = self.last = first_number(life_of(epoch) + 1)
        self._keep()
        return True

    def _read(self) -> int:
        """The number of the life before; 0 where that is not known."""
        if self._file is None:
            return 0
        try:
            with self._file.open("rb") as file:
                known = int(file.read(MAX_BYTES))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            self._lost(str(error))
            return 0
        return known if 0 < known < LIMIT - SPAN else 0

    def _keep(self) -> None:
        """Where the disk is full or read-only, only the members remember the number."""
        if self._file is None:
            return
        made = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            made.write_text(f"{self.epoch}\n", encoding="ascii")
            made.replace(self._file)
        except OSError as error:
            self._lost(str(error))
