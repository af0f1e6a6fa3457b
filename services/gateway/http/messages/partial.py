"""The input of a tool's use as an object: all of it, or what is whole of one that was cut off."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped


def object_of(text: str) -> dict[str, Any]:
    """Empty where the model wrote no object.  Takes linear time."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = json.loads(_completed(text))
        except (ValueError, RecursionError):
            found = {}
    if not isinstance(found, dict):
        return {}
    return _encodable(found) if SURROGATE.search(text) else found


def _encodable(found: dict[str, Any]) -> dict[str, Any]:
    """With U+FFFD in the place of halves of surrogate pairs, which a model may escape and UTF-8 does not have."""
    text = json.dumps(found, ensure_ascii=False)
    whole: dict[str, Any] = json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    return whole


class _Open(NamedTuple):
    """What closes the innermost object or list, and the one around it: a link, so that remembering a place is cheap."""

    closing: str
    around: _Open | None


def _completed(text: str) -> str:
    """The longest beginning of `text` that ends with a whole value of an object or a list, closed."""
    opened: _Open | None = None
    end, left = 0, opened  # behind the last whole value, and what is open there
    place, is_key = 0, False
    while place < len(text):
        char = text[place]
        if char == '"':
            place = _end_of_string(text, place)
            if not is_key and place <= len(text):
                end, left = place, opened
            continue
        if char == "," and text[place - 1] not in '"}]':  # a number or a word has ended here
            end, left = place, opened
        place += 1
        if char in "{[":
            opened = _Open("}" if char == "{" else "]", opened)
            end, left = place, opened
        elif char in "}]":
            if opened is None or opened.closing != char:
                break
            opened = opened.around
            end, left = place, opened
        if char in "{,:[":
            is_key = char in "{," and opened is not None and opened.closing == "}"
    closings = []
    while left is not None:
        closings.append(left.closing)
        left = left.around
    return text[:end] + "".join(closings)


def _end_of_string(text: str, place: int) -> int:
    """Behind the string that begins at `place`; behind the text where it does not end."""
    place += 1
    while place < len(text) and text[place] != '"':
        place += 2 if text[place] == "\\" else 1
    return place + 1
