"""Automata follow a grammar token by token: which tokens they allow next, and which error they raise where none is."""

from __future__ import annotations

import pytest

from shared.automata.automaton import Automaton, make_automaton
from shared.automata.limits import GrammarError
from shared.requests.grammar import GrammarKind
from tests.engine.execution.constraints.test_row_automata import EOS, TOKENIZER, compiled, load, texts


def automaton(kind: GrammarKind, text: str) -> Automaton:
    return make_automaton(load(EOS), compiled(kind, text).text)


def test_an_automaton_goes_on_and_stays_where_it_is_when_asked_about_more() -> None:
    one = automaton(GrammarKind.CHOICE, '["yes", "no"]')
    yes = TOKENIZER.encode_plain("yes")
    assert one.num_valid([*yes, 0, 7]) == len(yes) + 1 and one.num_valid([7]) == 0
    before = one.allowed().copy()
    behind = one.allowed_behind([*yes, 0])
    assert behind.shape == (len(yes) + 2, TOKENIZER.vocab_size) and texts(behind[len(yes)]) == {"<end>"}
    assert behind[-1].all(), "what is behind the end is void"
    assert (one.allowed() == before).all() and (behind[0] == before).all()
    copy = one.copy()
    one.advance(yes)
    assert texts(one.allowed()) == {"<end>"} and (copy.allowed() == before).all()
    with pytest.raises(GrammarError):
        copy.advance([7])


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "((a{0,100}){0,100}){0,100}"])
def test_one_that_is_too_large_is_said_to_be_and_no_other_constraint_is_blamed(pattern: str) -> None:
    one = automaton(GrammarKind.REGEX, pattern)
    with pytest.raises(GrammarError, match="it is too large") as caught:
        for _ in range(50):
            allowed = one.allowed()
            one.advance([int(allowed.nonzero()[0][-1])])
    assert "constraints" not in str(caught.value)


def test_only_a_token_that_is_not_allowed_is_blamed_on_other_constraints() -> None:
    one = automaton(GrammarKind.REGEX, "abc")
    refused = int((~one.allowed()).nonzero()[0][0])
    with pytest.raises(GrammarError, match="other constraints"):
        one.advance([refused])


def test_a_draft_that_breaks_the_grammar_has_nothing_behind_it_that_counts() -> None:
    one = automaton(GrammarKind.REGEX, "[a-c]{6}")
    (letter,) = TOKENIZER.encode_plain("a")
    wrong = TOKENIZER.encode_plain("z")[0]
    found = one.allowed_behind([letter, wrong, letter])
    assert not found[1, wrong] and found[1].any() and found[2].all() and found[3].all()
    one.advance([letter])
    assert (one.allowed() == found[1]).all(), "it went back"
