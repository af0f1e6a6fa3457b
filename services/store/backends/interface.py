"""What a store needs of another system that keeps values by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import PageantError

Value = bytes | bytearray | memoryview


class BackendError(PageantError):
    """A backend cannot be used over this connection any more."""


class ValueStore(Protocol):
    """One connection, used by one thread.  Names are 64 hexadecimal digits.

    A method may take as long as the other system takes.  Where the connection is of no use any more, a method raises
    BackendError, OSError or whatever the library of that system raises; then another connection is made later.
    """

    def put(self, name: str, parts: Sequence[Value]) -> bool:
        """Keep the parts of a value, joined; False where it is not taken, as where there is no room.  An earlier value
        of the name may stay."""

    def get(self, names: Sequence[str], size: int) -> list[Value | None]:
        """The values of names, which should have so many bytes; None for what is not there."""

    def has(self, names: Sequence[str]) -> list[bool]:
        """Which of these names have a value."""

    def drop(self, name: str) -> None:
        """Forget a value, so that the name can have another one."""

    def close(self) -> None:
        """Nothing is asked any more."""


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """How the two threads of a store connect.  Neither call needs to succeed: it is made again later."""

    reader: Callable[[], ValueStore]
    writer: Callable[[], ValueStore]
