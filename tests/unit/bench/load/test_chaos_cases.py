"""What chaos asks for: every kind as often as every other, each request one of its own, formats that do end."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from scripts.bench.chaos.cases import PLAIN, adapter_cases, byte_cases, grammar_cases, plain_cases, stop_cases
from scripts.bench.chaos.streams import StreamOutput, differences
from scripts.bench.common.tokens import MODEL
from shared.automata.compiling import Compiler
from shared.requests.grammar import Grammar, GrammarKind

PER_KIND = 8


def test_every_kind_is_asked_for_as_often_and_no_request_twice() -> None:
    texts = [f"{index} said that the end of the story is a long way from here, and more" for index in range(PER_KIND)]
    cases = [
        *plain_cases(PER_KIND, 240), *stop_cases(PER_KIND, 240, texts), *byte_cases(PER_KIND, 240, MODEL),
        *grammar_cases(PER_KIND, 240), *adapter_cases(PER_KIND, 240, ["one", "two"]),
    ]  # fmt: skip
    kinds = Counter(case.kind for case in cases)
    assert set(kinds) == {*PLAIN, "stop strings", "bytes", "grammar", "adapters"} and set(kinds.values()) == {PER_KIND}
    assert len({case.request.SerializeToString(deterministic=True) for case in cases}) == len(cases)


@pytest.mark.parametrize("max_tokens", [120, 240])
def test_formats_are_of_two_kinds_and_can_be_compiled(max_tokens: int) -> None:
    asked = [case.request.sampling.grammar for case in grammar_cases(PER_KIND, max_tokens)]
    assert Counter(grammar.WhichOneof("kind") for grammar in asked) == {"regex": 4, "json_schema": 4}
    for grammar in asked:
        kind = GrammarKind(grammar.WhichOneof("kind"))
        assert Compiler().compile(Grammar(kind, getattr(grammar, kind.value)))
    counts = [json.loads(grammar.json_schema)["minItems"] for grammar in asked if grammar.json_schema]
    assert min(counts) == max_tokens // 24 and len(set(counts)) == 4


def test_a_difference_is_told_with_its_place() -> None:
    wanted = [StreamOutput(text="abc", token_ids=[1, 2, 3])]
    assert not differences("grammar", [StreamOutput(text="abc", token_ids=[1, 2, 3], drafts=(4, 2))], wanted)
    (told,) = differences("grammar", [StreamOutput(text="abc", token_ids=[1, 5, 3])], wanted)
    assert told.startswith("grammar, sequence 0: token_ids differs from 1 on")
