"""The scheduler's whole state as plain data, and back: what a recording that does not begin at the start begins with.

The objects that can be reached are numbered; each becomes a row of plain values in which `[n]` stands for object n.  So
what is shared stays shared, and cycles are no matter.  Only classes of the scheduler's core, messages and Python's own
containers are known; a row names its class, which must be loaded already: reading a file never imports or calls
anything else.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from types import FunctionType
from typing import Any

import msgspec

from shared.errors import ProtocolError

SCALARS = frozenset({type(None), bool, int, float, str, bytes})
SEQUENCES: dict[str, type] = {"list": list, "set": set, "deque": deque}
VALUES: dict[str, type] = {"tuple": tuple, "frozenset": frozenset}  # built at once: nothing can be added later
MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
OURS = ("services.scheduler.", "shared.")

Rows = list[list[Any]]  # of each object: its kind, then what it holds


def freeze(state: Mapping[str, Any]) -> Rows:
    """Rows of a mapping and of all that can be reached from it; row 0 is the mapping's own.  Raises TypeError on an
    object that is none of ours."""
    return _Freezer().rows(dict(state))


def thaw(rows: Rows) -> dict[str, Any]:
    """What `freeze` was given.  Raises ProtocolError where the rows are none of its."""
    try:
        return _Thawer(rows).objects()
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"this is not a state of this version of the scheduler: {error!r}") from error


class _Freezer:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by id
        self._objects: list[Any] = []  # kept alive, so that no id comes twice

    def rows(self, root: Any) -> Rows:
        self._number(root)
        rows: Rows = []
        while len(rows) < len(self._objects):  # describing one may add more
            rows.append(self._row(self._objects[len(rows)]))
        return rows

    def _number(self, item: Any) -> int:
        number = self._numbers.setdefault(id(item), len(self._objects))
        if number == len(self._objects):
            self._objects.append(item)
        return number

    def _value(self, item: Any) -> Any:
        return item if type(item) in SCALARS else [self._number(item)]

    def _values(self, items: Any) -> list[Any]:
        return [item if type(item) in SCALARS else [self._number(item)] for item in items]

    def _row(self, item: Any) -> list[Any]:
        kind = type(item)
        if kind.__name__ in SEQUENCES | VALUES and kind.__module__ in ("builtins", "collections"):
            return [kind.__name__, self._values(item)]
        if kind.__name__ in MAPPINGS and kind.__module__ in ("builtins", "collections"):
            return [kind.__name__, self._values(item.keys()), self._values(item.values())]
        if kind is array:
            return ["array", item.typecode, item.tolist()]
        if kind is FunctionType:
            return ["function", *_name(item)]
        return self._row_of_ours(item, _name(kind))

    def _row_of_ours(self, item: Any, name: tuple[str, str]) -> list[Any]:
        if isinstance(item, Enum):
            return ["enum", *name, item.value]
        if isinstance(item, msgspec.Struct):
            return ["struct", *name, msgspec.msgpack.encode(item)]
        if isinstance(item, tuple):
            return ["named", *name, self._values(item)]
        state = dict(_state(item))
        return ["object", *name, list(state), self._values(state.values())]


def _name(item: Any) -> tuple[str, str]:
    if not item.__module__.startswith(OURS):
        raise TypeError(f"{item!r} is not of the scheduler's own modules")
    return item.__module__, item.__qualname__


def _state(item: Any) -> Iterator[tuple[str, Any]]:
    """Attributes and their values, those in slots included."""
    for kind in type(item).__mro__:
        for name in kind.__dict__.get("__slots__", ()):
            if name != "__weakref__" and hasattr(item, name):
                yield name, getattr(item, name)
    yield from getattr(item, "__dict__", {}).items()


class _Thawer:
    """First every object that can be filled later comes into being, then each is given what it holds."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._made: dict[int, Any] = {}

    def objects(self) -> dict[str, Any]:
        for number, row in enumerate(self._rows):
            if row[0] in SEQUENCES:
                self._made[number] = SEQUENCES[row[0]]()
            elif row[0] in MAPPINGS:
                self._made[number] = MAPPINGS[row[0]]()
            elif row[0] == "object":
                kind = _known(row[1], row[2])
                self._made[number] = kind.__new__(kind)
        for filled in ("object", *SEQUENCES, *MAPPINGS):  # keys are hashed: what they are made of comes first
            for number, row in enumerate(self._rows):
                if row[0] == filled:
                    self._fill(self._made[number], row)
        root = self._made[0]
        if not isinstance(root, dict):
            raise ValueError("row 0 is not a mapping")
        return root

    def _fill(self, item: Any, row: list[Any]) -> None:
        if row[0] == "object":
            for name, value in zip(row[3], row[4], strict=True):
                object.__setattr__(item, name, self._value(value))
        elif row[0] in MAPPINGS:
            for key, value in zip(row[1], row[2], strict=True):
                item[self._value(key)] = self._value(value)
        elif row[0] == "set":
            item.update(map(self._value, row[1]))
        else:
            item.extend(map(self._value, row[1]))

    def _value(self, value: Any) -> Any:
        return self._object(value[0]) if type(value) is list else value

    def _object(self, number: int) -> Any:
        if number not in self._made:
            self._made[number] = self._make(self._rows[number])
        return self._made[number]

    def _make(self, row: list[Any]) -> Any:
        kind, *rest = row
        if kind in VALUES:
            return VALUES[kind](map(self._value, rest[0]))
        if kind == "array":
            return array(*rest)
        if kind == "function":
            return _known(*rest)
        if kind == "enum":
            return _known(*rest[:2])(rest[2])
        if kind == "struct":
            return msgspec.msgpack.decode(rest[2], type=_known(*rest[:2]))
        if kind == "named":
            return _known(*rest[:2])(*map(self._value, rest[2]))
        raise ValueError(f"a row of kind {kind!r}")


def _known(module: str, qualname: str) -> Any:
    """A class or function of ours, which is loaded already."""
    if not module.startswith(OURS):
        raise ValueError(f"{module}.{qualname} is not of the scheduler's own modules")
    found: Any = sys.modules[module]
    for name in qualname.split("."):
        found = getattr(found, name)
    if getattr(found, "__module__", "") != module or not isinstance(found, type | FunctionType):
        raise ValueError(f"{module}.{qualname} is neither a class nor a function")
    return found
