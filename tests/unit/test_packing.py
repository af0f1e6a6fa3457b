"""Packed token ids: what goes in comes out, and bounds are checked as one would check each id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ProtocolError
from shared.packing import are_below, pack_tokens, unpack_tokens

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70)
EDGES = st.lists(
    st.sampled_from([0, 1, 255, 256, 65535, 65536, 128_255, 128_256, 2**31 - 1, -1, -(2**31)]), max_size=70
)


@given(IDS)
def test_what_is_packed_comes_out(ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(ids)) == ids


@given(IDS | EDGES, st.integers(1, 2**31) | st.sampled_from([1, 256, 65536, 128_256, 2**31]))
def test_bounds_are_those_of_each_id(ids: list[int], bound: int) -> None:
    assert are_below(pack_tokens(ids), bound) is all(0 <= each < bound for each in ids)


@pytest.mark.parametrize("place", [0, 1, 4998, 4999])
@pytest.mark.parametrize("culprit", [-1, 1000, 2**31 - 1])
def test_one_bad_id_among_many_is_found_wherever_it_is(place: int, culprit: int) -> None:
    ids = [999] * 5000
    assert are_below(pack_tokens(ids), 1000)
    ids[place] = culprit
    assert not are_below(pack_tokens(ids), 1000)


def test_half_an_id_is_refused() -> None:
    with pytest.raises(ProtocolError):
        unpack_tokens(b"abcde")
