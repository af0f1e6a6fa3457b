"""Well-formed nonsense: values that fit a message's types and nothing else, made from the types themselves.

A message that is declared tomorrow is fuzzed tomorrow: no list of messages is kept here.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

INTS = (
    0, 1, 2, 3, 5, 16, 17, 63, 64, 255, 1000, 65_536, -1, -2, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1,
    2**63, 2**64 - 1, -(2**63),
)  # fmt: skip
FLOATS = (0.0, 0.5, 1.0, 2.0, -1.0, -0.0, 1e-9, 5e-324, 1e308, 1e39, float("nan"), float("inf"), float("-inf"), 1.7e9)
STRINGS = (
    "", "a", "worker", "r1", "\0", "\x1b[2J", "../../etc", "é" * 40, "x" * 400, "ipc:///tmp/else.sock",
    "tcp://10.0.0.1:22", "tcp://*:*", "memory://nobody", "ipc://\0", "inproc://x", "{{ 7 * 7 }}", "‮", "🦊",
)  # fmt: skip
BYTES = (b"", b"\0", b"\0\0\0", b"\0\0\0\0", b"\1\0\0\0\2\0\0\0", b"\xff" * 4, b"\xff\xff\xff\x7f" * 3, b"\0" * 4096)
MAX_ITEMS = 4


class Nonsense:
    """Draws values; `known` are ids, addresses and numbers that mean something where the frames go, or none."""

    def __init__(self, rng: random.Random, known: Sequence[str | int] = ()) -> None:
        self._rng = rng
        self._ints = [*INTS, *([value for value in known if isinstance(value, int)] * 4)]
        self._strings = [*STRINGS, *([value for value in known if isinstance(value, str)] * 8)]

    def message(self, kind: Any) -> bytes:
        """One frame that decodes as `kind`, but for numbers that its field cannot hold."""
        return msgspec.msgpack.encode(self.value(described(kind)))

    def value(self, kind: inspect.Type) -> Any:
        """Plain data that fits a type."""
        rng = self._rng
        match kind:
            case inspect.StructType():
                return [kind.tag, *map(self._field, kind.fields)] if kind.tag else [*map(self._field, kind.fields)]
            case inspect.IntType():
                return rng.choice(self._ints) if rng.random() < 0.8 else rng.randrange(0, 4096)
            case inspect.FloatType():
                return rng.choice(FLOATS)
            case inspect.StrType():
                return rng.choice(self._strings)
            case inspect.BytesType():
                return rng.choice(BYTES)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.ListType():
                return [self.value(kind.item_type) for _ in range(self._length())]
            case inspect.TupleType():
                return [self.value(item) for item in kind.item_types]
            case inspect.DictType():
                return {self.value(kind.key_type): self.value(kind.value_type) for _ in range(self._length())}
            case inspect.EnumType():
                return rng.choice(list(kind.cls)).value
            case inspect.UnionType():
                return self.value(rng.choice(kind.types))
            case inspect.NoneType():
                return None
        raise TypeError(f"no values are known for {kind}")

    def _field(self, field: inspect.Field) -> Any:
        """What a field would hold by itself, half of the time: a message wrong in everything is refused too early."""
        if field.default is not msgspec.NODEFAULT and self._rng.random() < 0.5:
            return field.default
        if field.default_factory is not msgspec.NODEFAULT and self._rng.random() < 0.5:
            return field.default_factory()
        return self.value(field.type)

    def _length(self) -> int:
        return self._rng.randrange(MAX_ITEMS + 1) if self._rng.random() < 0.98 else 300


@cache
def described(kind: Hashable) -> inspect.Type:
    """A message's fields and their types, all the way down."""
    return inspect.type_info(kind)
