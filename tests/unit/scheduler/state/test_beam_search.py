"""Beam search by itself: one that is wide enough finds what an exhaustive one finds, and narrow ones keep the rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from services.scheduler.state.beam_search import BeamOutput, BeamSearch, Hypothesis, LengthBounds, Move
from shared.messages import TokenLogprobs
from shared.requests.beam import Beam, EarlyStopping
from shared.requests.sampling import SamplingParams
from tests.unit.scheduler.worlds.beam_world import logprobs_of, search

VOCAB = 4
LENGTH = 4
END = 0


def all_outputs(vocab_size: int, longest: int) -> Iterator[list[int]]:
    """Every output that there can be: of full length, or ended by the end token."""
    for length in range(1, longest + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            ends = tokens[-1] == END
            if END not in tokens[:-1] and (ends or length == longest):
                yield list(tokens)


def logprob_of(prompt: list[int], output: list[int], vocab_size: int) -> float:
    """Of a whole output: the sum over its tokens."""
    return sum(logprobs_of([*prompt, *output[:place]], vocab_size)[token] for place, token in enumerate(output))


def exhaustive(prompt: list[int], vocab_size: int, longest: int, penalty: float) -> list[list[int]]:
    outputs = all_outputs(vocab_size, longest)
    return sorted(outputs, key=lambda o: -logprob_of(prompt, o, vocab_size) / len(o) ** penalty)


def best(prompt: list[int], beam: Beam, vocab_size: int = VOCAB, longest: int = LENGTH) -> list[Hypothesis]:
    params = SamplingParams(beam=beam, max_tokens=longest, ignore_eos=False)
    return search(prompt, params, vocab_size, 128)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("seed", range(20))
def test_a_search_as_wide_as_the_tree_finds_what_an_exhaustive_one_finds(seed: int, penalty: float) -> None:
    width = VOCAB**LENGTH
    found = best([seed], Beam(width, penalty, EarlyStopping.NEVER))
    wanted = exhaustive([seed], VOCAB, LENGTH, penalty)
    assert [one.token_ids for one in found] == wanted[: len(found)]
    assert len(found) == len(wanted)


def test_a_narrow_search_misses_what_a_wide_one_finds() -> None:
    """Or else the test before would prove little."""
    missed = sum(best([seed], Beam(1))[0].token_ids != exhaustive([seed], VOCAB, LENGTH, 1.0)[0] for seed in range(50))
    assert 5 < missed < 50


def test_the_wider_the_likelier_on_the_whole() -> None:
    means = []
    for width in (1, 2, 4, 16):
        found = [best([seed], Beam(width, 0.0, EarlyStopping.NEVER), 12, 6)[0] for seed in range(60)]
        means.append(sum(one.score for one in found) / len(found))
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.3


def test_scores_are_those_of_the_tokens() -> None:
    for one in best([3], Beam(6, 0.7), 10, 7):
        wanted = logprob_of([3], one.token_ids, 10) / len(one.token_ids) ** 0.7
        assert one.score == pytest.approx(wanted)
        assert (one.end_id == END) == (one.token_ids[-1] == END)


def test_the_first_to_be_complete_stop_a_search_that_says_so() -> None:
    """`first` looks no further than as many ends as the search is wide; `never` finds no worse."""
    shorter = 0
    for seed in range(40):
        first, never = (best([seed], Beam(3, 1.0, when), 6, 12) for when in (EarlyStopping.FIRST, EarlyStopping.NEVER))
        assert never[0].score >= first[0].score
        shorter += max(len(one.token_ids) for one in first) < max(len(one.token_ids) for one in never)
    assert shorter > 5


def test_no_end_comes_before_min_tokens() -> None:
    params = SamplingParams(beam=Beam(4), max_tokens=6, min_tokens=5, ignore_eos=False)
    for seed in range(20):
        assert all(len(one.token_ids) >= 5 for one in search([seed], params, 5, 128))


def test_log_probabilities_are_told_of_every_token_of_the_answer() -> None:
    params = SamplingParams(beam=Beam(4), max_tokens=5, logprobs=2)
    for one in search([7], params, 20, 128):
        for place, (token, entry) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
            logprobs = logprobs_of([7, *one.token_ids[:place]], 20)
            likeliest = sorted(range(20), key=lambda other: -logprobs[other])
            assert entry is not None
            assert entry.token_ids == [token, *likeliest[:2]]
            assert entry.logprobs == [logprobs[other] for other in entry.token_ids]
            assert entry.rank == 1 + likeliest.index(token)


def said(*candidates: tuple[int, float], taken: int) -> TokenLogprobs:
    """What a worker says behind a beam: the token that it took, then the likeliest."""
    logprobs = dict(candidates)
    return TokenLogprobs([taken, *logprobs], [logprobs[taken], *logprobs.values()], 1)


def begun(width: int = 2, ends: frozenset[int] = frozenset(), **more: Any) -> BeamSearch:
    return BeamSearch(Beam(width, **more), ends, 1)


EMPTY = {0: BeamOutput([], [])}
FAR = LengthBounds(0, 9)


def test_a_beam_whose_worker_took_its_token_says_so() -> None:
    one = begun()
    assert (one.is_ready, one.has_answer(0)) == (False, False)
    one.hear(0, said((3, -1.0), (7, -2.0), (9, -3.0), taken=7))
    assert (one.is_ready, one.has_answer(0)) == (True, True)
    stays, begins = one.advance(EMPTY, FAR)
    assert stays == Move(0, 0, 3, False, TokenLogprobs([3, 3], [-1.0, -1.0], 1))
    assert begins == Move(1, 0, 7, True, TokenLogprobs([7, 3], [-2.0, -1.0], 2))
    assert one.scores == {0: -1.0, 1: -2.0} and not one.answers


def test_the_best_behind_each_beam_stays_and_others_take_what_is_free() -> None:
    one = begun(3)
    one.scores = {0: -5.0, 1: -1.0, 2: -1.5}
    one.hear(0, said((1, -1.0), (2, -2.0), (3, -3.0), taken=1))
    one.hear(1, said((4, -1.0), (5, -1.25), (6, -9.0), taken=4))
    one.hear(2, said((7, -1.0), (8, -8.0), (9, -9.0), taken=7))
    outputs = {slot: BeamOutput([1], []) for slot in range(3)}
    assert [(move.slot, move.source, move.token_id) for move in one.advance(outputs, FAR)] == [
        (1, 1, 4), (0, 1, 5), (2, 2, 7)
    ]  # fmt: skip
    assert one.scores == {1: -2.0, 0: -2.25, 2: -2.5}


def test_of_equals_the_earlier_beam_and_the_likelier_place_come_first() -> None:
    one = begun(3)
    one.scores = {1: -1.0, 0: -1.0}
    one.hear(1, said((4, -1.0), (5, -1.0), taken=4))
    one.hear(0, said((8, -1.0), (2, -1.0), taken=8))
    outputs = {slot: BeamOutput([1], []) for slot in range(2)}
    assert [(move.source, move.token_id) for move in one.advance(outputs, FAR)] == [(0, 8), (0, 2), (1, 4)]


def test_only_ends_among_the_likeliest_count_and_the_best_are_kept() -> None:
    one = begun(2, frozenset((0, 5)), length_penalty=0.0)
    one.hear(0, said((3, -1.0), (0, -2.0), (5, -3.0), (7, -4.0), taken=3))
    moves = one.advance(EMPTY, FAR)
    assert [move.token_id for move in moves] == [3, 7] and [h.token_ids for h in one.hypotheses] == [[0]]
    assert one.hypotheses[0].end_id == 0 and one.hypotheses[0].score == -2.0
    one.hear(0, said((0, -0.25), (5, -0.5), (8, -3.0), (9, -4.0), taken=0))
    one.hear(1, said((1, -9.0), (2, -9.5), (3, -9.75), (4, -9.9), taken=1))
    outputs = {0: BeamOutput([3], []), 1: BeamOutput([7], [])}
    one.advance(outputs, FAR)
    assert [(h.token_ids, h.score) for h in one.hypotheses] == [([3, 0], -1.25), ([3, 5], -1.5)]


@pytest.mark.parametrize(
    ("when", "penalty", "best", "is_over"),
    [
        (EarlyStopping.FIRST, 1.0, -0.1, True),
        (EarlyStopping.LIKELY, 0.0, -3.0, True),  # as likely as the worst that has ended
        (EarlyStopping.LIKELY, 0.0, -2.9, False),
        (EarlyStopping.LIKELY, 1.0, -6.0, True),  # -6 / 2 tokens
        (EarlyStopping.NEVER, 1.0, -6.0, False),  # -6 / 9 tokens may become better
        (EarlyStopping.NEVER, 1.0, -27.0, True),
        (EarlyStopping.NEVER, 0.0, -3.0, True),  # its score can only sink
        (EarlyStopping.NEVER, -1.0, -1.5, True),
    ],
)
def test_when_a_search_with_as_many_ends_as_it_is_wide_is_over(
    when: EarlyStopping, penalty: float, best: float, is_over: bool
) -> None:
    one = begun(2, length_penalty=penalty, early_stopping=when)
    one.hypotheses = [Hypothesis(-1.0, [0], [], 0), Hypothesis(-3.0, [0], [], 0)]
    one.scores = {0: 0.0}
    one.hear(0, said((3, best), (7, best - 1), taken=3))
    assert (one.advance({0: BeamOutput([1], [])}, FAR) == []) == is_over


def test_a_search_with_fewer_ends_than_it_is_wide_goes_on() -> None:
    one = begun(2, early_stopping=EarlyStopping.FIRST)
    one.hypotheses = [Hypothesis(-1.0, [0], [], 0)]
    one.hear(0, said((3, -50.0), (7, -51.0), taken=3))
    assert len(one.advance(EMPTY, FAR)) == 2


def test_a_search_that_has_come_to_its_length_is_over() -> None:
    one = begun(2)
    one.hear(0, said((3, -1.0), (7, -2.0), (8, -3.0), taken=3))
    assert one.advance(EMPTY, LengthBounds(0, 1)) == []
    assert [(h.token_ids, h.end_id) for h in one.hypotheses] == [([3], None), ([7], None)]
    assert begun(3, frozenset((0, 1))).num_candidates == 5
