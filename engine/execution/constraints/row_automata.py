"""The automata of the rows that have a grammar or a budget of reasoning, and the tokens that each allows next.

A step samples such a row only if its allowed tokens are known by then.  They are computed in threads during the step's
forward pass, from the tokens of the step before; if they are late, that row alone gets no sample in this step.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Any, Protocol

import structlog

from engine.execution.constraints.budgeted import BudgetedAutomaton
from engine.sampling.processing import Flags
from shared.automata.automaton import Automaton, make_automaton
from shared.automata.limits import GrammarError
from shared.automata.vocabulary import Vocabulary
from shared.messages.steps import AdmittedSequence
from shared.packing import LANE, unpack_tokens
from shared.processes.idle_time import take_idle_time_only
from shared.requests.grammar import GrammarKind

log = structlog.get_logger()

MAX_GRAMMARS = 16  # kept ready; each may come to 30 MB
PATIENCE = 0.002  # seconds that a step with other rows waits for those that are not ready, and take no idle time
LONG_PATIENCE = 0.05  # where no other row waits
COSTLY = 0.001  # seconds: what took so long gets idle time only, the next time


class StepTokens(Protocol):
    """The tokens of a step, once it has ended."""

    def wait(self) -> None:
        """Wait until the step has ended."""
        ...

    def of(self, sample: int) -> list[int]:
        """The tokens of one of the rows that it sampled, once it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Ends:
    """Tokens that end a sequence.  Too early for them, they are allowed only where nothing else is."""

    eos: tuple[int, ...]
    stops: tuple[int, ...]
    min_length: int  # of prompt and output
    ignores_eos: bool

    def permit(
        self,
        allowed: Flags,  # [vocab_size], changed in place
        length: int,
    ) -> Flags:
        if length < self.min_length:
            _forbid(allowed, (*self.eos, *self.stops))
        elif self.ignores_eos:
            _forbid(allowed, self.eos)
        return allowed


@dataclass(frozen=True, slots=True)
class Standing:
    """An automaton that has consumed all tokens of its sequence."""

    automaton: Automaton | BudgetedAutomaton
    length: int  # of prompt and output
    allowed: Flags  # [vocab_size] next
    seconds: float  # of a core, that it took

    @property
    def is_costly(self) -> bool:
        return self.seconds > COSTLY


@dataclass(frozen=True, slots=True)
class Trial:
    """Of draft tokens on an automaton."""

    token_ids: list[int]
    found: Future[Flags]  # [1 + tokens, vocab_size]


@dataclass(slots=True)
class Held:
    """A row that has a grammar."""

    ends: Ends
    standing: Future[Standing]
    behind: StepTokens | None = None  # the step whose tokens it stands behind
    trial: Trial | None = None  # the last one
    is_slow: bool = True  # takes idle time, or was late; and has not been ready without a wait since

    @property
    def is_ready(self) -> bool:
        return self.standing.done() and (self.trial is None or self.trial.found.done())

    @property
    def refusal(self) -> str:
        """Why its grammar cannot be followed; empty where it can, or that is not known yet."""
        return _failure(self.standing) or (_failure(self.trial.found) if self.trial is not None else "")

    def allowed(self, draft_token_ids: list[int]) -> Flags | None:  # [1 + drafts, vocab_size]
        """What may come next, and behind each of these; None where that is not known yet, or never will be."""
        if not self.is_ready or self.refusal:
            return None
        if not draft_token_ids:
            return self.standing.result().allowed[None]
        if self.trial is None or self.trial.token_ids != draft_token_ids:
            return None
        return self.trial.found.result()


class RowAutomata:
    """Called by the thread that steps.

    Invariant: a row's jobs follow each other, each begun when the one before it had ended or was waited for, so an
    automaton is in one thread at a time; what was not ready in time is left alone until it is.
    """

    def __init__(
        self, load: Callable[[Sequence[int]], Vocabulary], *, patience: float = PATIENCE, vocab_size: int = 0
    ) -> None:
        self.patience = patience
        self._vocab_size = vocab_size
        self._load = load
        self._known = threading.Lock()  # of the next two, which building threads share
        self._vocabulary: Vocabulary | None = None  # the last one
        self._ready: OrderedDict[str, Automaton] = OrderedDict()  # at their starts, for that vocabulary
        self._rows: dict[int, Held] = {}
        # Their threads begin with the first work: there are none where no request has asked.
        self._building = ThreadPoolExecutor(1, "grammars", initializer=take_idle_time_only)
        self._resuming = ThreadPoolExecutor(1, "resuming")  # of streams that have begun elsewhere, and wait
        self._following = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4)), "automata")

    def __bool__(self) -> bool:
        return bool(self._rows)

    # -- rows

    def reset(self) -> None:
        self.release(list(self._rows))

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            if held := self._rows.pop(row, None):
                held.standing.cancel()

    def admit(self, sequence: AdmittedSequence) -> None:
        """Begin to build a sequence's automaton, where it has one; whatever its row had before is over."""
        self.release([sequence.row])
        params = sequence.params
        if params.is_held:
            held = self._without_grammar(sequence) if params.grammar is None else self._with_grammar(sequence)
            self._rows[sequence.row] = held

    def _with_grammar(self, sequence: AdmittedSequence) -> Held:
        params = sequence.params
        min_length = sequence.num_prompt_tokens + params.min_tokens
        eos = tuple(sequence.eos_token_ids)
        ends = Ends(eos, tuple(params.stop_token_ids), min_length, params.ignore_eos)
        has_output = len(sequence.token_ids) // LANE > sequence.num_prompt_tokens
        threads = self._resuming if has_output else self._building
        return Held(ends, threads.submit(self._build, sequence, ends))

    def _without_grammar(self, sequence: AdmittedSequence) -> Held:
        """A budget alone takes no time, and leaves ends as they are."""
        ends = Ends((), (), 0, ignores_eos=False)
        known: Future[Standing] = Future()
        known.set_result(self._lead(None, sequence, ends))
        return Held(ends, known, is_slow=False)

    def of(self, row: int) -> Held | None:
        return self._rows.get(row)

    # -- steps

    def wait(self, helds: Sequence[Held], *, others: bool) -> None:
        """Until all are ready, or for so long as may be: `others` are in the step too, and do not wait for the slow."""
        for held in helds:
            if held.behind is not None:
                held.behind.wait()
        for held in helds:
            held.is_slow = held.is_slow and not held.is_ready
        deadline = monotonic() + (self.patience if others else max(LONG_PATIENCE, self.patience))
        for held in helds:
            if not (held.is_slow and others):
                _wait(held.standing, deadline)
                if held.trial is not None:
                    _wait(held.trial.found, deadline)
                held.is_slow = not held.is_ready

    def advance(self, held: Held, tokens: StepTokens, sample: int) -> None:
        """The row has taken the tokens of a step's sample: find what may come behind them."""
        standing, held.trial, held.behind = held.standing.result(), None, tokens
        held.is_slow = standing.is_costly
        held.standing = self._thread_for(standing).submit(_advance, standing, held.ends, tokens, sample)

    def try_drafts(self, held: Held, draft_token_ids: list[int]) -> None:
        """Find what may come at each of the positions that verify these.  The row must be ready."""
        standing = held.standing.result()
        held.is_slow = standing.is_costly
        found = self._thread_for(standing).submit(_try, standing, held.ends, draft_token_ids)
        held.trial = Trial(draft_token_ids, found)

    # -- in the building threads

    def _build(self, sequence: AdmittedSequence, ends: Ends) -> Standing:
        grammar = sequence.params.grammar
        if grammar is None or grammar.kind is not GrammarKind.COMPILED:
            raise GrammarError("was not compiled")
        return self._lead(self._pristine(grammar.text, ends.eos).copy(), sequence, ends)

    def _lead(self, grammar: Automaton | None, sequence: AdmittedSequence, ends: Ends) -> Standing:
        """Through the output so far."""
        history, budget = unpack_tokens(sequence.token_ids), sequence.params.thinking
        output = history[sequence.num_prompt_tokens :]
        if budget is not None:
            budgeted = BudgetedAutomaton(budget, self._vocab_size, grammar, ends.eos)
            return _stand(budgeted, output, ends, len(history))
        assert grammar is not None
        return _stand(grammar, output, ends, len(history))

    def _pristine(self, text: str, eos_token_ids: tuple[int, ...]) -> Automaton:
        """An automaton at its start, for the model's vocabulary with these ends of sequence."""
        vocabulary = self._vocabulary_with(eos_token_ids)
        with self._known:
            found = self._ready.get(text)
        if found is None or found.vocabulary is not vocabulary:
            found = make_automaton(vocabulary, text)
        with self._known:
            self._ready[text] = found
            self._ready.move_to_end(text)
            if len(self._ready) > MAX_GRAMMARS:
                self._ready.popitem(last=False)
        return found

    def _vocabulary_with(self, eos_token_ids: tuple[int, ...]) -> Vocabulary:
        with self._known:
            found = self._vocabulary
        if found is None or found.eos_token_ids != eos_token_ids:
            with ThreadPoolExecutor(1, "vocabulary") as loader:  # it should not wait for idle time, as this thread may
                found = loader.submit(self._load, eos_token_ids).result()
            with self._known:
                self._vocabulary = found
        return found

    def _thread_for(self, standing: Standing) -> ThreadPoolExecutor:
        """A row whose last step was costly is followed in idle time only."""
        return self._building if standing.is_costly else self._following


def _advance(standing: Standing, ends: Ends, tokens: StepTokens, sample: int) -> Standing:
    new, automaton = tokens.of(sample), standing.automaton
    length = standing.length + len(new)
    if new[-1] in ends.eos:
        return Standing(automaton, length, standing.allowed, 0.0)  # it is over and is not used again
    return _stand(automaton, new, ends, length)


def _stand(automaton: Automaton | BudgetedAutomaton, new: list[int], ends: Ends, length: int) -> Standing:
    """Behind `new` tokens more, `length` with all before."""
    begin = thread_time()
    automaton.advance(new)
    allowed = ends.permit(automaton.allowed(), length)
    return Standing(automaton, length, allowed, thread_time() - begin)


def _try(standing: Standing, ends: Ends, draft_token_ids: list[int]) -> Flags:
    found = standing.automaton.allowed_behind(draft_token_ids)
    for place, allowed in enumerate(found):
        ends.permit(allowed, standing.length + place)
    return found


def _forbid(
    allowed: Flags,  # [vocab_size], changed in place
    token_ids: Sequence[int],
) -> None:
    """Unless nothing else is allowed."""
    places = list(token_ids)
    kept = allowed[places].copy()
    allowed[places] = False
    if not allowed.any():
        allowed[places] = kept


def _failure(future: Future[Any]) -> str:
    """The error in words for the client; empty where there is none so far."""
    if not future.done() or (error := future.exception()) is None:
        return ""
    if isinstance(error, GrammarError):
        return str(error)
    log.error("automaton_failed", exc_info=error)
    return "cannot be followed"


def _wait(future: Future[Any], deadline: float) -> None:
    with contextlib.suppress(Exception):  # the reader of the future gets the error
        future.exception(max(0.0, deadline - monotonic()))
