"""Options that take several values in one word: `--workers 1,2,4`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

T = TypeVar("T")


class Listed(click.ParamType[list[Any]]):
    """Values of one kind, separated by commas."""

    def __init__(self, kind: Callable[[str], Any], name: str) -> None:
        self._kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        if not isinstance(value, str):
            return list(value)
        try:
            return [self._kind(word) for word in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not {self.name}", param, ctx)


def positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise ValueError(word)
    return number


INTEGERS = Listed(positive, "whole numbers from 1, with commas between")
NUMBERS = Listed(float, "numbers, with commas between")
WORDS = Listed(str, "words, with commas between")
