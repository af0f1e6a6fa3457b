"""What messages are, as text: the same with every version of Python and of the library that encodes them.

The library's own JSON schema of one and the same message differs from release to release, and so would a hash of it:
services whose images were built on different days refused each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec


def described(inboxes: Sequence[Any]) -> str:
    """A line for each message, for each type within, and for each inbox's union, in an order of their own.  Raises
    TypeError for types that nothing here knows, and where two have one name."""
    found: dict[str, tuple[type, str]] = {}
    unions = [_named(union, found) for union in inboxes]
    return "\n".join([*(line for _, (_, line) in sorted(found.items())), *unions])


def _named(kind: Any, found: dict[str, tuple[type, str]]) -> str:
    """How a type is written in a line; its own line is among those that are `found` then."""
    origin, arguments = get_origin(kind), [_named(one, found) for one in get_args(kind)]
    if origin in (Union, UnionType):
        return " | ".join(sorted(arguments))
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(arguments)}]"
    if kind is Ellipsis:
        return "..."
    if kind is NoneType:
        return "None"
    if kind in (bool, int, float, str, bytes):
        return str(kind.__name__)
    if not isinstance(kind, type) or not issubclass(kind, Enum | msgspec.Struct):
        raise TypeError(f"{kind!r} is no type that messages are described with")
    name = kind.__name__
    if name not in found:
        found[name] = kind, ""  # it may be within itself
        found[name] = kind, f"{name} = {_members(kind) if issubclass(kind, Enum) else _fields(kind, found)}"
    if found[name][0] is not kind:
        raise TypeError(f"two types of messages have the name {name}")
    return name


def _members(kind: type[Enum]) -> str:
    return " ".join(f"{one.name}:{one.value!r}" for one in kind)


def _fields(kind: type[msgspec.Struct], found: dict[str, tuple[type, str]]) -> str:
    fields = msgspec.structs.fields(kind)
    written = [f"{one.encode_name}: {_named(one.type, found)}{_default(one)}" for one in fields]
    config = kind.__struct_config__
    return f"{config.tag!r} {'array' if config.array_like else 'object'}({', '.join(written)})"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = {field.default_factory.__name__}()"
    return "" if field.default is msgspec.NODEFAULT else f" = {_value(field.default)}"


def _value(value: Any) -> str:
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, msgspec.Struct):
        return f"({', '.join(_value(getattr(value, name)) for name in value.__struct_fields__)})"
    return repr(value)
