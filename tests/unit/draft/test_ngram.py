"""Prompt lookup against a search through the whole text, and where it stops."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.draft.ngram import NEAR, PIECE, UNLIMITED, NGramIndex, NGramProposer
from tests.unit.draft.samples import admitted

NUM_CASES = 10_000


def search(token_ids: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The rule itself: the longest suffix that is there before, its earliest occurrence, what follows it."""
    end = len(token_ids)
    for length in range(min(longest, end - 1), shortest - 1, -1):
        for start in range(end - length):
            if token_ids[start : start + length] == token_ids[end - length :]:
                return token_ids[start + length : start + length + count]
    return []


def test_lookup_is_the_search_however_the_text_came() -> None:
    generator = random.Random(1)
    num_found = 0
    for _ in range(NUM_CASES):
        shortest = generator.randint(1, 3)
        longest = generator.randint(shortest, 5)
        letters = range(generator.randint(1, 4))
        text: list[int] = []
        index = NGramIndex(shortest, longest)
        for _ in range(generator.randint(1, 4)):
            more = generator.choices(letters, k=generator.randint(0, 12))
            text += more
            index.extend(more)
            count = generator.randint(1, 6)
            found = index.lookup(count)
            assert found == search(text, shortest, longest, count), (text, shortest, longest, count)
            num_found += bool(found)
    assert num_found > NUM_CASES


def test_the_longest_suffix_wins_and_of_equals_the_earliest() -> None:
    index = NGramIndex(1, 3)
    index.extend([7, 3, 1, 7, 4, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3])
    assert index.lookup(3) == [8, 1, 2]
    index = NGramIndex(1, 3)
    index.extend([1, 5, 1, 6, 1])
    assert index.lookup(9) == [5, 1, 6, 1]


def proposer(max_model_len: int = 0) -> NGramProposer:
    return NGramProposer(num_rows=4, max_model_len=max_model_len, shortest=1, longest=3)


def guessed(lookup: NGramProposer, row: int, goal: int) -> list[int]:
    assert not lookup.finished(row, goal)
    lookup.propose({row: goal}, False)
    assert lookup.finished(row, 1000), "one look is all that can be done"
    return lookup.guess(row, 1000).token_ids


TEXT = [1, 2, 3, 4, 5, 6, 1, 2]


@pytest.mark.parametrize(
    ("params", "max_model_len", "expected"),
    [
        ({}, 0, [3, 4, 5, 6]),
        ({}, 10, [3, 4]),
        ({}, 8, []),
        ({}, 7, []),
        ({"max_tokens": 3}, 0, [3, 4, 5]),
        ({"stop_token_ids": [4]}, 0, [3, 4]),
        ({"eos_token_ids": [3]}, 0, [3]),
        ({"eos_token_ids": [3], "ignore_eos": True}, 0, [3, 4, 5, 6]),
        ({"eos_token_ids": [3, 5], "min_tokens": 2}, 0, [3, 4, 5]),
    ],
)
def test_nothing_is_proposed_that_cannot_be(params: dict[str, Any], max_model_len: int, expected: list[int]) -> None:
    lookup = proposer(max_model_len)
    lookup.open(admitted(2, TEXT, **params))
    assert guessed(lookup, 2, 4) == expected


def test_never_more_than_wanted() -> None:
    lookup = proposer()
    lookup.open(admitted(0, TEXT))
    assert guessed(lookup, 0, 2) == [3, 4]
    lookup.commit(0, [3])
    assert guessed(lookup, 0, 2) == [4, 5]
    lookup.commit(0, [9])
    assert guessed(lookup, 0, 2) == []


def test_rows_are_apart_and_forgotten() -> None:
    lookup = proposer()
    lookup.open(admitted(0, TEXT))
    lookup.open(admitted(1, [1, 2]))
    assert guessed(lookup, 1, 2) == []
    lookup.close(0)
    lookup.open(admitted(0, [1, 2]))
    assert guessed(lookup, 0, 2) == []
    lookup.reset()
    lookup.open(admitted(1, TEXT))
    assert guessed(lookup, 1, 2) == [3, 4]
    assert lookup.capacity.vocab_size == 0 and lookup.capacity.max_model_len == UNLIMITED


def test_long_texts_are_read_in_pieces_and_no_other_row_waits_for_them() -> None:
    generator = random.Random(1)
    texts = [generator.choices(range(9), k=count) for count in (2 * PIECE + 1, PIECE - 1, NEAR)]
    lookup = proposer()
    read: list[int] = []
    finished: list[int] = []
    for row, text in enumerate(texts):
        lookup.open(admitted(row, text))
    assert [lookup.is_behind(row) for row in range(3)] == [True, True, False]
    goals = dict.fromkeys(range(3), 4)
    while len(finished) < 3:
        assert lookup.propose(goals, False) >= 1
        read.append(sum(len(lookup._rows[row].index.token_ids) for row in range(3)))
        finished += [row for row in range(3) if lookup.finished(row, 4) and row not in finished]
    assert finished == [2, 1, 0], "the shortest first"
    assert all(after - before <= PIECE + NEAR for before, after in zip([0, *read], read, strict=False))
    for row, text in enumerate(texts):
        assert lookup.guess(row, 4).token_ids == search(text, 1, 3, 4)
    lookup.commit(0, texts[0][: NEAR + 1])
    lookup.propose({0: 4}, False)
    assert not lookup.finished(0, 4), "what is committed is read too"
    lookup.propose({0: 4}, False)
    assert lookup.guess(0, 4).token_ids == search(texts[0] + texts[0][: NEAR + 1], 1, 3, 4)
