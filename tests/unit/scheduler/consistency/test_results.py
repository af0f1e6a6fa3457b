"""What a worker may answer to a plan, and what cannot be an answer to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.scheduler.consistency.results import StepLost, check_order, check_result
from services.scheduler.draft_length.proposal import VerifiableDrafts
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from services.scheduler.state.step import Step
from shared.errors import ProtocolError
from shared.messages import Refusal, RefusedRow, StepResult, TokenLogprobs
from shared.requests.grammar import Grammar, GrammarKind
from shared.requests.sampling import SamplingParams

VOCAB = 50
ENTRY = TokenLogprobs([1], [-1.0], 1)


def sequences(*has_grammar: bool) -> list[Sequence]:
    grammar = Grammar(GrammarKind.REGEX, "a")
    params = [SamplingParams(grammar=grammar if one else None) for one in has_grammar]
    return cast(list[Sequence], [SimpleNamespace(request=SimpleNamespace(params=one)) for one in params])


def step() -> Step:
    """A row that samples, one that computes a part of its prompt, one with a grammar."""
    return Step(sequences=sequences(False, False, True), num_samples=[1, 0, 1])


def verifying() -> Step:
    """Two drafts, none, one and a grammar, a part of a prompt."""
    drafts = [VerifiableDrafts([7, 8]), VerifiableDrafts(), VerifiableDrafts([9]), VerifiableDrafts()]
    return Step(sequences=sequences(False, False, True, False), num_samples=[1, 1, 1, 0], drafts=drafts, num_drafts=3)


def result(num_sampled: list[int], tokens: list[int], **more: Any) -> StepResult:
    return StepResult(1, 4, num_sampled, tokens, **more)


GOOD = [
    result([1, 0, 1], [0, VOCAB - 1]),
    result([1, 0, 0], [5]),
    result([1, 0, 1], [5, 6], logprobs=[ENTRY, None]),
    result([1, 0, 0], [5], refused={2: "no"}),
    result([1, 0, 0], [5], refused={1: "no"}),
    result([1, 0, 1], [5, 6], prompt_logprobs={0: [ENTRY], 2: []}, embeddings={0: b"", 2: b""}),
    result([0, 0, 1], [5], refused_rows=[RefusedRow(0, Refusal.NOT_IN_STEP)]),
    result([1, 0, 1], [5, 6], num_head_drafts=[2, 0, 1], head_draft_ids=[0, VOCAB - 1, 7]),
    result([1, 0, 1], [5, 6], num_head_drafts=[0, 0, 0]),
]
BAD = {
    "not what the plan asked for": [
        result([1, 0], [5]), result([1, 1, 1], [5, 6, 7]), result([0, 0, 1], [5]), result([1, 0, 1, 0], [5, 6]),
        result([1, 0, 2], [5, 6, 7]), result([2, 0, 1], [5, 6, 7]),
        result([1, 0, 1], [5, 6], refused_rows=[RefusedRow(0, Refusal.NOT_IN_STEP)]),
    ],
    "token ids for its samples": [result([1, 0, 1], [5]), result([1, 0, 1], [5, 6, 7])],
    "a token outside": [result([1, 0, 1], [5, VOCAB]), result([1, 0, 1], [-1, 5])],
    "log-probabilities for 2 tokens": [result([1, 0, 1], [5, 6], logprobs=[ENTRY])],
    "refuses an entry": [result([1, 0, 0], [5], refused={entry: "no"}) for entry in (-1, 0, 3)],
    "log-probabilities of a prompt": [result([1, 0, 1], [5, 6], prompt_logprobs={entry: []}) for entry in (-1, 3)],
    "an embedding": [result([1, 0, 1], [5, 6], embeddings={entry: b""}) for entry in (-1, 1, 3)],
    "refused entry": [
        result([1, 0, 1], [5, 6], refused_rows=[RefusedRow(entry, Refusal.NOT_IN_STEP)]) for entry in (-1, 3)
    ],
    "drafts of a head": [
        result([1, 0, 1], [5, 6], head_draft_ids=[7]),
        *(
            result([1, 0, 1], [5, 6], num_head_drafts=counts, head_draft_ids=[7, 8])
            for counts in ([2, 0], [2, 0, 0, 0], [1, 0, 0], [2, 0, 1], [3, -1, 0])
        ),
    ],
    "a head drafts a token outside": [
        result([1, 0, 1], [5, 6], num_head_drafts=[1, 0, 1], head_draft_ids=[7, token]) for token in (-1, VOCAB)
    ],
    "refused twice": [result([0, 0, 1], [5], refused_rows=[RefusedRow(0, Refusal.NOT_IN_STEP)] * 2)],
}  # fmt: skip


@pytest.mark.parametrize("answer", GOOD)
def test_what_can_be_an_answer_is_taken(answer: StepResult) -> None:
    refused = {one.entry for one in answer.refused_rows}
    assert check_result(step(), answer, VOCAB) == [0 if 0 in refused else 1, 0, 1]


@pytest.mark.parametrize(("words", "answer"), [(words, answer) for words, answers in BAD.items() for answer in answers])
def test_what_cannot_be_one_is_refused_in_words(words: str, answer: StepResult) -> None:
    with pytest.raises(ProtocolError, match=words):
        check_result(step(), answer, VOCAB)


@pytest.mark.parametrize(
    ("num_sampled", "tokens"),
    [([1, 1, 1, 0], [5, 5, 5]), ([2, 1, 2, 0], [7, 5, 5, 9, 5]), ([3, 1, 0, 0], [7, 8, 5, 5])],
)
def test_accepted_drafts_and_one_token_more_are_an_answer(num_sampled: list[int], tokens: list[int]) -> None:
    assert check_result(verifying(), result(num_sampled, tokens), VOCAB) == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("num_sampled", "tokens", "words"),
    [
        ([1, 1, 1], [5, 5, 5], "3 entries, not 4"),
        ([0, 1, 1, 0], [5, 5], "not what the plan asked for"),
        ([4, 1, 1, 0], [7, 8, 5, 5, 5, 5], "not what the plan asked for"),
        ([1, 2, 1, 0], [5, 5, 5, 5], "not what the plan asked for"),
        ([1, 1, 3, 0], [5, 5, 9, 5, 5], "not what the plan asked for"),
        ([1, 1, 1, 1], [5, 5, 5, 5], "not what the plan asked for"),
        ([2, 1, 1, 0], [8, 5, 5, 5], "were not drafted"),
        ([3, 1, 1, 0], [7, 9, 5, 5, 5], "were not drafted"),
        ([1, 1, 2, 0], [5, 5, 8, 5], "were not drafted"),
    ],
)
def test_drafts_that_were_not_sent_are_not_accepted(num_sampled: list[int], tokens: list[int], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        check_result(verifying(), result(num_sampled, tokens), VOCAB)


def replica(*in_flight: int, num_steps: int = 8) -> Replica:
    steps = [Step(step_id=step_id) for step_id in in_flight]
    return cast(Replica, SimpleNamespace(instance="w", in_flight=steps, num_steps=num_steps))


def test_answers_come_in_the_order_of_their_plans() -> None:
    assert check_order(replica(6, 7), 6)
    assert not check_order(replica(6, 7), 5) and not check_order(replica(), 7)
    with pytest.raises(StepLost):
        check_order(replica(6, 7), 7)
    for step_id in (8, 9):
        with pytest.raises(ProtocolError) as caught:
            check_order(replica(6, 7), step_id)
        assert not isinstance(caught.value, StepLost), "there is no such plan"
    with pytest.raises(ProtocolError):
        check_order(replica(), 9)
    assert not check_order(replica(), 8), "nothing was asked"
