"""Beam search by itself: one that is wide enough finds what an exhaustive one finds, and narrow ones keep the rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from services.scheduler.state.beam_search import Hypothesis
from shared.beam import Beam, EarlyStopping
from shared.sampling import SamplingParams
from tests.unit.scheduler.beam_world import logprobs_of, search

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
