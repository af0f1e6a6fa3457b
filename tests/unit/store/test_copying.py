"""Copies of blocks, with numpy and without it."""

from __future__ import annotations

import random

import pytest

from shared.data_link import copying


@pytest.mark.parametrize("has_numpy", [True, False])
@pytest.mark.parametrize("size", [8, 4096, 3 * 4096 + 8, 1, 4099])
@pytest.mark.parametrize("offset", [0, 1])  # of a word's place in memory
def test_every_byte_arrives_and_none_beside(
    size: int, offset: int, *, has_numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_numpy:
        monkeypatch.setattr(copying, "np", None)
    source = random.Random(size).randbytes(size)
    around = bytearray(b"\x55" * (size + 16))
    copying.copy_into(memoryview(around)[offset : offset + size], memoryview(source))
    assert around == b"\x55" * offset + source + b"\x55" * (16 - offset)


@pytest.mark.parametrize("word", [0x7FF0000000000001, 0xFFF8000000000000, 0x8000000000000000])
def test_what_is_no_number_goes_through(word: int) -> None:
    """Signalling NaNs, NaNs with a sign, and a zero with one."""
    source, place = word.to_bytes(8, "little") * 512, bytearray(4096)
    copying.copy_into(memoryview(place), memoryview(source))
    assert place == source
