"""Copies that make a checksum on the way: every byte, none beside, and zlib's CRC-32."""

from __future__ import annotations

import random
import threading
from zlib import crc32

import pytest

from kernels.cpu.binding.native import Native
from tests.kernels.cpu.natives import BUILDS, load_build

ROOM = 64  # bytes around a place
SIZES = (1, 3, 127, 128, 129, 255, 256, 1000, 4096, 368_640, 368_641)


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Native:
    native = load_build(request.param)
    if not native.copies_checked:
        pytest.skip("this processor has no products without carries of 256 bits (VPCLMULQDQ)")
    return native


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 17])  # in memory, of both
def test_bytes_and_checksum_are_those_of_the_source(native: Native, size: int, offset: int) -> None:
    source = random.Random(size).randbytes(offset + size)
    around = bytearray(b"\x55" * (size + ROOM))
    place = memoryview(around)[offset : offset + size]
    assert native.copy_checked(place, memoryview(source)[offset:]) == crc32(source[offset:])
    assert around == b"\x55" * offset + source[offset:] + b"\x55" * (ROOM - offset)


@pytest.mark.parametrize("content", [b"\0", b"\xff", b"\x80"])
@pytest.mark.parametrize("size", [128, 1152])
def test_bytes_that_are_all_one(native: Native, content: bytes, size: int) -> None:
    assert native.copy_checked(memoryview(bytearray(size)), memoryview(content * size)) == crc32(content * size)


def test_one_bit_changes_the_checksum_wherever_it_is(native: Native) -> None:
    source, place = bytearray(1000), memoryview(bytearray(1000))
    found = {native.copy_checked(place, memoryview(source))}
    for at in range(len(source)):
        source[at] ^= 1 << at % 8
        found.add(native.copy_checked(place, memoryview(source)))
        source[at] ^= 1 << at % 8
    assert len(found) == 1 + len(source)


def test_nothing_is_copied_into_a_place_of_another_size(native: Native) -> None:
    place = memoryview(bytearray(8))
    with pytest.raises(ValueError, match="9 bytes for a place of 8"):
        native.copy_checked(place, memoryview(bytes(9)))
    assert not any(place)


def test_threads_copy_at_once(native: Native) -> None:
    """It takes no turn at the team, and shares nothing."""
    sources = [random.Random(index).randbytes(100_000) for index in range(4)]
    wrong: list[int] = []

    def copy(index: int) -> None:
        place = memoryview(bytearray(100_000))
        for _ in range(50):
            if (
                native.copy_checked(place, memoryview(sources[index])) != crc32(sources[index])
                or place != sources[index]
            ):
                wrong.append(index)

    threads = [threading.Thread(target=copy, args=(index,)) for index in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
