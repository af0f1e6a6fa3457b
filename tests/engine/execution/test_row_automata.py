"""Automata beside the step: what rows may take next, who is waited for and how long, what is kept."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from engine.execution.row_automata import MAX_GRAMMARS, Held, RowAutomata, Standing
from shared.automata.automaton import Automaton, make_automaton
from shared.automata.compiling import Compiler
from shared.automata.limits import GrammarError
from shared.automata.vocabulary import Vocabulary, load_vocabulary
from shared.grammar import Grammar, GrammarKind
from shared.idle_time import LEAST_URGENT, take_idle_time_only
from shared.messages import AdmittedSequence
from shared.packing import pack_tokens
from shared.sampling import SamplingParams
from shared.tokenization import ModelTokenizer, load_tokenizer
from tests.integration.engine import MODEL

TOKENIZER: ModelTokenizer = load_tokenizer(MODEL)
EOS = (0, 3)


class Said:
    """Tokens of a step that ends when it is let."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.ended = threading.Event()

    def wait(self) -> None: ...

    def of(self, sample: int) -> list[int]:
        assert self.ended.wait(20)
        return self.token_ids if sample == 0 else []


def load(eos_token_ids: Sequence[int]) -> Vocabulary:
    return load_vocabulary(MODEL, TOKENIZER.vocab_size, eos_token_ids)


def compiled(kind: GrammarKind, text: str) -> Grammar:
    return Grammar(GrammarKind.COMPILED, Compiler().compile(Grammar(kind, text)))


def automaton(kind: GrammarKind, text: str) -> Automaton:
    return make_automaton(load(EOS), compiled(kind, text).text)


def sequence(row: int, grammar: Grammar | None, output: str = "", **params: object) -> AdmittedSequence:
    given = SamplingParams(grammar=grammar, **params)  # type: ignore[arg-type]
    tokens = [5, 6, *TOKENIZER.encode_plain(output)]
    return AdmittedSequence(row, pack_tokens(tokens), 2, given, 0, list(EOS))


def choice(*texts: str) -> Grammar:
    return compiled(GrammarKind.CHOICE, "[" + ",".join(f'"{text}"' for text in texts) + "]")


def texts(allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> set[str]:
    return {"<end>" if token in EOS else TOKENIZER.decode([int(token)]) for token in np.flatnonzero(allowed)}


@pytest.fixture
def automata() -> Iterator[RowAutomata]:
    made = RowAutomata(load, patience=20.0)
    yield made
    made.reset()


def held_of(automata: RowAutomata, admitted: AdmittedSequence) -> Held:
    automata.admit(admitted)
    held = automata.of(admitted.row)
    assert held is not None
    automata.wait([held], others=False)
    return held


def allowed(held: Held, drafts: list[int] | None = None) -> list[set[str]]:
    found = held.allowed(drafts or [])
    assert found is not None, held.refusal
    return [texts(one) for one in found]


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


def test_a_row_is_followed_and_taken_up_behind_its_output(automata: RowAutomata) -> None:
    held = held_of(automata, sequence(0, choice("the end", "the fox")))
    the = TOKENIZER.encode_plain("the")
    said = Said(the)
    said.ended.set()
    automata.advance(held, said, 0)
    automata.wait([held], others=True)
    resumed = held_of(automata, sequence(1, choice("the end", "the fox"), "the"))
    assert allowed(held) == allowed(resumed) and " end" in allowed(held)[0]


def test_drafts_are_tried_and_only_those_that_were_count(automata: RowAutomata) -> None:
    held = held_of(automata, sequence(0, choice("yes")))
    yes = TOKENIZER.encode_plain("yes")
    automata.try_drafts(held, yes)
    automata.wait([held], others=True)
    assert allowed(held, yes)[-1] == {"<end>"} and held.allowed([*yes, 7]) is None
    assert allowed(held)[0] == allowed(held, yes)[0]


@pytest.mark.parametrize("wish", [{"min_tokens": 9}, {"ignore_eos": True}])
def test_ends_wait_for_as_long_as_anything_else_may_come(automata: RowAutomata, wish: dict[str, object]) -> None:
    more = compiled(GrammarKind.REGEX, "ab?")
    assert allowed(held_of(automata, sequence(0, more, "a"))) == [{"b", "<end>"}]
    assert allowed(held_of(automata, sequence(0, more, "a", **wish))) == [{"b"}]
    assert allowed(held_of(automata, sequence(0, more, "ab", **wish))) == [{"<end>"}]


def test_who_is_late_is_not_waited_for_twice() -> None:
    automata = RowAutomata(load, patience=0.01)
    automata.admit(sequence(0, choice("yes")))
    held = automata.of(0)
    assert held is not None
    held.standing.result(20)
    said = Said(TOKENIZER.encode_plain("yes"))
    automata.advance(held, said, 0)
    for _ in range(2):
        automata.wait([held], others=True)
        assert held.is_slow and held.allowed([]) is None and not held.refusal
    said.ended.set()
    automata.wait([held], others=False)
    assert allowed(held) == [{"<end>"}]
    automata.wait([held], others=True)
    assert not held.is_slow


def test_what_takes_idle_time_keeps_nobody_waiting() -> None:
    begun, free = threading.Event(), threading.Event()

    def slow(eos_token_ids: Sequence[int]) -> Vocabulary:
        begun.set()
        assert free.wait(20)
        return load(eos_token_ids)

    automata = RowAutomata(slow, patience=20.0)
    automata.admit(sequence(0, compiled(GrammarKind.REGEX, "(yes)*")))
    held = automata.of(0)
    assert held is not None and begun.wait(20)
    automata.wait([held], others=True)
    before = held.is_slow, held.is_ready
    free.set()
    automata.wait([held], others=False)
    automata.wait([held], others=True)
    assert before == (True, False), "it was being built, and the step went on"
    assert (held.is_slow, held.is_ready) == (False, True)
    yes = Said(TOKENIZER.encode_plain("yes"))
    for seconds in (1.0, 0.0):
        held.standing = finished(replace(held.standing.result(), seconds=seconds))
        automata.advance(held, yes, 0)
        assert held.is_slow == (seconds == 1.0), "the costly one is followed in idle time"
        yes.ended.set()
        automata.wait([held], others=False)
        automata.try_drafts(held, yes.token_ids)
        automata.wait([held], others=False)
        assert held.allowed(yes.token_ids) is not None


def test_a_stream_that_goes_on_does_not_wait_for_idle_time(automata: RowAutomata) -> None:
    free = threading.Event()
    automata._building.submit(free.wait, 20)  # all idle time is taken
    more = compiled(GrammarKind.REGEX, "ab")
    automata.admit(sequence(0, more))
    assert allowed(held_of(automata, sequence(1, more, "a"))) == [{"b"}]
    begins = automata.of(0)
    assert begins is not None and not begins.is_ready
    free.set()
    begins.standing.result(20)


def finished(standing: Standing) -> Future[Standing]:
    made: Future[Standing] = Future()
    made.set_result(standing)
    return made


def test_what_cannot_be_followed_says_so(automata: RowAutomata) -> None:
    for grammar in (
        Grammar(GrammarKind.COMPILED, "start: nowhere"),
        Grammar(GrammarKind.REGEX, "a"),
    ):
        held = held_of(automata, sequence(0, grammar))
        assert held.refusal and held.allowed([]) is None and "\n" not in held.refusal
    broken = held_of(automata, sequence(0, choice("yes"), "no"))
    assert "constraints" in broken.refusal


def test_without_a_tokenizer_the_reason_is_told() -> None:
    def nothing(eos_token_ids: Sequence[int]) -> Vocabulary:
        raise GrammarError("is not possible")

    held = held_of(RowAutomata(nothing, patience=20.0), sequence(0, choice("yes")))
    assert held.refusal == "is not possible"


def test_rows_without_a_grammar_have_none_and_start_no_thread() -> None:
    automata = RowAutomata(load)
    automata.admit(sequence(0, None))
    assert not automata and automata.of(0) is None and not automata._building._threads


def test_few_grammars_are_kept(automata: RowAutomata) -> None:
    for place in range(MAX_GRAMMARS + 3):
        held_of(automata, sequence(place, choice(f"w{place}")))
    assert len(automata._ready) == MAX_GRAMMARS
    automata.release(range(MAX_GRAMMARS + 3))
    assert not automata


def test_what_was_costly_is_followed_in_idle_time() -> None:
    automata = RowAutomata(load, patience=20.0)
    held = held_of(automata, sequence(0, choice("ab", "cd")))
    standing = held.standing.result()
    cheap, costly = (replace(standing, seconds=seconds) for seconds in (0.0, 1.0))
    names = {one.seconds: automata._thread_for(one).submit(_urgency).result() for one in (cheap, costly)}
    assert names[0.0] == os.SCHED_OTHER
    assert names[1.0] == (os.SCHED_IDLE if sys.platform == "linux" else os.SCHED_OTHER)


def _urgency() -> int:
    return os.sched_getscheduler(threading.get_native_id())


def test_a_sandbox_without_idle_time_leaves_the_least_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    with ThreadPoolExecutor(1, initializer=take_idle_time_only) as pool:
        found = pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert found == (LEAST_URGENT if sys.platform == "linux" else 0)
