"""The description of messages, whose hash services compare before they talk to each other."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from typing import Any

import msgspec
import pytest

from shared.messages import schema_hash
from shared.messages.inboxes import INBOXES
from shared.messages.schema import described


class Color(StrEnum):
    RED = "r"
    BLUE = "b"


class Inner(msgspec.Struct, array_like=True, frozen=True):
    number: int = 3
    inner: Inner | None = None


class Outer(msgspec.Struct, array_like=True, frozen=True, tag=True):
    color: Color
    pairs: list[tuple[int, ...]] = []
    inner: Inner = Inner()
    data: dict[str, bytes | float] = {}
    best: Color = Color.BLUE


def test_a_description_says_all_that_the_bytes_depend_on() -> None:
    assert described([Outer | Inner, Outer]).splitlines() == [
        "Color = RED:'r' BLUE:'b'",
        "Inner = None array(number: int = 3, inner: Inner | None = None)",
        "Outer = 'Outer' array(color: Color, pairs: list[tuple[int, ...]] = list(), inner: Inner = (3, None), "
        "data: dict[str, bytes | float] = dict(), best: Color = 'b')",
        "Inner | Outer",
        "Outer",
    ]


def changed(name: str = "M", tag: str = "M", array: bool = True, **fields: Any) -> str:
    given = fields or {"a": int, "b": (str, "x")}
    pairs = [(one, *kind) if isinstance(kind, tuple) else (one, kind) for one, kind in given.items()]
    made = msgspec.defstruct(name, pairs, tag=tag, array_like=array, frozen=True)
    return described([made])


def test_each_change_changes_it() -> None:
    kinds = [
        changed(), changed(name="N"), changed(tag="N"), changed(array=False), changed(a=int),
        changed(c=int, b=(str, "x")), changed(a=float, b=(str, "x")), changed(a=int, b=(str, "y")),
        changed(a=int, b=str),
        changed(a=Color, b=(str, "x")), changed(a=int | None, b=(str, "x")), changed(a=list[int], b=(str, "x")),
        changed(b=(str, "x"), a=(int, 0)),
    ]  # fmt: skip
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("kind", [set[int], Any, object, complex])
def test_a_type_that_nothing_knows_is_an_error(kind: Any) -> None:
    with pytest.raises(TypeError, match="is no type that messages are described with"):
        changed(a=kind)


def test_two_types_of_one_name_are_an_error() -> None:
    others = [msgspec.defstruct("Same", [(name, int)]) for name in "ab"]
    with pytest.raises(TypeError, match="two types of messages have the name Same"):
        described(others)


def test_neither_hash_seeds_nor_the_librarys_own_schema_are_in_it() -> None:
    """The library describes one message otherwise in each of its releases."""
    code = (
        "import msgspec; msgspec.json.schema = msgspec.json.schema_components = None; msgspec.inspect = None\n"
        "from shared.messages import schema_hash; print(schema_hash())"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == schema_hash()
    assert len(described(INBOXES).splitlines()) > 80
