"""What `pageant serve` and the scheduler of a model tell each other: whether the model sleeps, and what it has to do.

Two files of one directory: the supervisor makes and removes ASLEEP, the scheduler renews ACTIVITY.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

ASLEEP, ACTIVITY = "asleep", "activity"
WIDTH = 256  # bytes of ACTIVITY, always


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model, as its scheduler has it."""

    num_requests: int = 0  # that have not ended
    num_taken: int = 0  # since the scheduler's beginning: a request between two looks shows in it
    num_gateways: int = 0  # on the roster
    num_workers: int = 0
    is_asleep: bool = False  # the scheduler knows that the model's workers are away on purpose

    @property
    def wants_workers(self) -> bool:
        """Whether requests wait for the model to be loaded."""
        return self.num_requests > 0 and not self.num_workers


def read_activity(directory: Path) -> Activity | None:
    """None where nothing was said yet, or it is being written now."""
    try:
        return msgspec.json.decode((directory / ACTIVITY).read_bytes(), type=Activity)
    except (OSError, msgspec.DecodeError):
        return None


def write_activity(directory: Path, activity: Activity) -> None:
    """Write over what is there, in one go; as of status files no block is freed for it.  Raises OSError."""
    file = os.open(directory / ACTIVITY, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, msgspec.json.encode(activity).ljust(WIDTH))
    finally:
        os.close(file)


def is_marked_asleep(directory: Path) -> bool:
    return (directory / ASLEEP).exists()


def mark_asleep(directory: Path, *, asleep: bool) -> None:
    """Raises OSError."""
    if asleep:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ASLEEP).touch()
    else:
        with contextlib.suppress(FileNotFoundError):
            (directory / ASLEEP).unlink()
