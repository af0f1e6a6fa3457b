"""Automata beside the step: what rows may take next, who is waited for and how long, what is kept."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from time import monotonic

import msgspec
import numpy as np
import pytest

from engine.execution.constraints.row_automata import Held, RowAutomata, Standing
from shared.automata.automaton import Automaton, make_automaton
from shared.automata.compiling import Compiler
from shared.automata.limits import GrammarError
from shared.automata.vocabulary import Vocabulary, load_vocabulary
from shared.messages import AdmittedSequence
from shared.packing import pack_tokens
from shared.processes.idle_time import LEAST_URGENT, take_idle_time_only
from shared.requests.grammar import Grammar, GrammarKind
from shared.requests.reasoning import ReasoningTags, ThinkingBudget
from shared.requests.sampling import SamplingParams
from shared.text.tokenization import ModelTokenizer, load_tokenizer
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


def said(token_ids: list[int]) -> Said:
    """Of a step that has ended."""
    made = Said(token_ids)
    made.ended.set()
    return made


def load(eos_token_ids: Sequence[int]) -> Vocabulary:
    return load_vocabulary(MODEL, TOKENIZER.vocab_size, eos_token_ids)


def compiled(kind: GrammarKind, text: str) -> Grammar:
    return Grammar(GrammarKind.COMPILED, Compiler().compile(Grammar(kind, text)))


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


def test_a_row_is_followed_and_taken_up_behind_its_output(automata: RowAutomata) -> None:
    held = held_of(automata, sequence(0, choice("the end", "the fox")))
    automata.advance(held, said(TOKENIZER.encode_plain("the")), 0)
    automata.wait([held], others=False)
    resumed = held_of(automata, sequence(1, choice("the end", "the fox"), "the"))
    assert allowed(held) == allowed(resumed) and " end" in allowed(held)[0]


def test_drafts_are_tried_and_only_those_that_were_count(automata: RowAutomata) -> None:
    held = held_of(automata, sequence(0, choice("yes")))
    yes = TOKENIZER.encode_plain("yes")
    automata.try_drafts(held, yes)
    automata.wait([held], others=False)
    assert allowed(held, yes)[-1] == {"<end>"} and held.allowed([*yes, 7]) is None
    assert allowed(held)[0] == allowed(held, yes)[0]


def test_an_end_waits_for_the_least_number_of_tokens_and_no_longer(automata: RowAutomata) -> None:
    held = held_of(automata, sequence(0, compiled(GrammarKind.REGEX, "a{1,6}"), "a", min_tokens=3))
    (letter,) = TOKENIZER.encode_plain("a")
    automata.try_drafts(held, [letter] * 3)
    automata.wait([held], others=False)
    assert ["<end>" in one for one in allowed(held, [letter] * 3)] == [False, False, True, True]
    for may_end in (False, True):
        automata.advance(held, said([letter]), 0)
        automata.wait([held], others=False)
        assert ("<end>" in allowed(held)[0]) == may_end


def test_a_row_that_has_ended_is_asked_no_more_and_harms_nobody(automata: RowAutomata) -> None:
    held = held_of(automata, sequence(0, choice("yes"), "yes"))
    automata.advance(held, said([EOS[0]]), 0)
    automata.wait([held], others=False)
    assert allowed(held) == [{"<end>"}] and not held.refusal


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
    late = Said(TOKENIZER.encode_plain("yes"))
    automata.advance(held, late, 0)
    for _ in range(2):
        automata.wait([held], others=True)
        assert held.is_slow and held.allowed([]) is None and not held.refusal
    late.ended.set()
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
    start = monotonic()
    automata.wait([held], others=True)
    before = held.is_slow, held.is_ready, monotonic() - start < 15
    free.set()
    automata.wait([held], others=False)
    automata.wait([held], others=True)
    assert before == (True, False, True), "it was being built, and the step went on"
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


def test_one_that_was_late_is_waited_for_again_once_it_was_ready_in_time(automata: RowAutomata) -> None:
    held = held_of(automata, sequence(0, compiled(GrammarKind.REGEX, "(yes)*")))
    for is_slow, is_ready in ((True, True), (False, False), (True, False)):
        held.is_slow, late = is_slow, Said(TOKENIZER.encode_plain("yes"))
        held.standing = finished(replace(held.standing.result(20), seconds=0.0))
        if not is_ready:
            automata.advance(held, late, 0)
            held.is_slow = is_slow
        threading.Timer(0.02, late.ended.set).start()
        automata.wait([held], others=True)
        assert held.is_slow == (is_slow and not is_ready)
        assert held.is_ready or held.is_slow


def test_only_a_step_without_others_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.constraints.row_automata.LONG_PATIENCE", 20.0)
    automata = RowAutomata(load, patience=0.0)
    held = held_of(automata, sequence(0, choice("yes")))
    for others in (True, False):
        held.standing = finished(replace(held.standing.result(20), seconds=0.0))
        late = Said([EOS[0]])
        automata.advance(held, late, 0)
        threading.Timer(0.02, late.ended.set).start()
        automata.wait([held], others=others)
        assert held.is_ready != others


def test_tokens_are_waited_for_before_their_automaton_is(automata: RowAutomata) -> None:
    class Step(Said):
        def wait(self) -> None:
            self.ended.set()

    held = held_of(automata, sequence(0, choice("yes")))
    automata.advance(held, Step(TOKENIZER.encode_plain("yes")), 0)
    automata.wait([held], others=False)
    assert allowed(held) == [{"<end>"}]


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
    for grammar, words in (
        (Grammar(GrammarKind.COMPILED, "start: nowhere"), ""),
        (Grammar(GrammarKind.REGEX, 'start: "a"'), "not compiled"),
    ):
        held = held_of(automata, sequence(0, grammar))
        assert held.refusal and words in held.refusal and held.allowed([]) is None and "\n" not in held.refusal
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


def test_a_row_has_nothing_of_the_sequence_that_it_had_before(automata: RowAutomata) -> None:
    free = threading.Event()
    automata._building.submit(free.wait, 20)
    waiting: list[Held | None] = []
    ends: list[Callable[[], None]] = [
        lambda: automata.admit(sequence(0, None)), lambda: automata.release([0]), automata.reset
    ]  # fmt: skip
    for end in ends:
        automata.admit(sequence(0, choice("yes")))
        waiting.append(automata.of(0))
        end()
        assert automata.of(0) is None and not automata
    free.set()
    assert all(held and held.standing.cancelled() for held in waiting), "a job that has not begun ends with its row"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars from which automata were made, in order."""
    found: list[str] = []

    def make(vocabulary: Vocabulary, text: str) -> Automaton:
        found.append(text)
        return make_automaton(vocabulary, text)

    monkeypatch.setattr("engine.execution.constraints.row_automata.make_automaton", make)
    return found


def test_the_grammars_that_were_used_last_are_kept(
    automata: RowAutomata, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.execution.constraints.row_automata.MAX_GRAMMARS", 2)
    one, two, three = (choice(text) for text in ("one", "two", "three"))
    for place, grammar in enumerate((one, two, one, three, one, three, two)):
        held_of(automata, sequence(place, grammar))
    assert made == [grammar.text for grammar in (one, two, three, two)]
    assert len(automata._ready) == 2


def test_ends_of_sequence_are_those_of_each_request(made: list[str]) -> None:
    loads: list[Sequence[int]] = []

    def counted(eos_token_ids: Sequence[int]) -> Vocabulary:
        loads.append(eos_token_ids)
        return load(eos_token_ids)

    automata = RowAutomata(counted, patience=20.0)
    for row, eos in enumerate(((0,), (0,), (3,), (0, 3))):
        whole = msgspec.structs.replace(sequence(row, choice("yes"), "yes"), eos_token_ids=list(eos))
        found = held_of(automata, whole).allowed([])
        assert found is not None and tuple(np.flatnonzero(found)) == eos
    assert loads == [(0,), (3,), (0, 3)] and len(made) == 3, "what is known is not made again"


def test_a_budget_of_reasoning_needs_no_vocabulary_and_no_thread() -> None:
    def nothing(eos_token_ids: Sequence[int]) -> Vocabulary:
        raise GrammarError("is not possible")

    automata = RowAutomata(nothing, patience=20.0, vocab_size=10)
    budget = ThinkingBudget(ReasoningTags([7], [[8]], [8, 9]), 2)
    params = SamplingParams(thinking=budget, min_tokens=9)
    automata.admit(AdmittedSequence(0, pack_tokens([7, 6, 7, 6]), 2, params, 0, list(EOS)))
    held = automata.of(0)
    assert held is not None and held.is_ready and not held.is_slow
    found = held.allowed([])
    assert found is not None and found.all() and found.shape == (1, 10), "of the prompt nothing counts"
    automata.advance(held, said([6]), 0)
    automata.wait([held], others=False)
    spent = held.allowed([])
    assert spent is not None and np.flatnonzero(spent).tolist() == [8]


def test_small_machines_follow_one_automaton_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(cores: int | None) -> int:
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        return RowAutomata(load)._following._max_workers

    assert threads(None) == threads(1) == threads(7) == 1 < threads(64) < 16


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
