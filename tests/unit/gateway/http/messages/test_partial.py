"""The input of a call that was cut off is what was whole of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http.messages.partial import object_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize(("text", "found"), [
    ("", {}),
    ("{", {}),
    ('{"a"', {}),
    ('{"a": ', {}),
    ('{"a": 1', {}),
    ('{"a": ["\\ud83d", "\\uD83D\\uDE00"], "\\udc00": 1}', {"a": ["\ufffd", "\U0001f600"], "\ufffd": 1}),
    ('{"a": "\\ud83d", "b": "', {"a": "\ufffd"}),
    ('{"a": 1,', {"a": 1}),
    ('{"a": "x"', {"a": "x"}),
    ('{"a": "x\\"', {}),
    ('{"a": "x", "b": "y', {"a": "x"}),
    ('{"a": {"b": [1, 2.5, tr', {"a": {"b": [1, 2.5]}}),
    ('{"a": [{"b": "c"}', {"a": [{"b": "c"}]}),
    ('{"a": 1}} more', {"a": 1}),
    ("[1, 2]", {}),
    ("none", {}),
    ("}", {}),
    ("[" * 100_000, {}),
])  # fmt: skip
def test_what_is_whole(text: str, found: dict[str, Any]) -> None:
    assert object_of(text) == found


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.data())
def test_every_beginning_is_part_of_the_whole(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    assert object_of(text) == value
    begun = object_of(text[: data.draw(st.integers(0, len(text)))])
    assert contains(value, begun)


def contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and contains(whole[key], inner) for key, inner in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(contains, whole, part))
    return bool(whole == part)
