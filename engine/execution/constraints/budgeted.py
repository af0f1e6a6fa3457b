"""Reasoning that is held to a budget, and an answer behind it that may have a grammar: followed as one automaton."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.automata.automaton import Automaton, Flags
from shared.requests.reasoning import ReasoningMeter, ThinkingBudget


class BudgetedAutomaton:
    """While there is reasoning, every token is allowed, until the budget is spent: then only what ends it.

    A grammar, if there is one, holds what is outside of reasoning; ends of sequence are its own then.
    """

    def __init__(
        self, budget: ThinkingBudget, size: int, grammar: Automaton | None, eos_token_ids: Sequence[int]
    ) -> None:
        """`size`: of the vocabulary."""
        self._budget = budget
        self._size = size
        self._grammar = grammar
        self._eos = list(eos_token_ids)
        self._meter = ReasoningMeter(budget.tags, is_inside=budget.is_open)
        self._owed: tuple[int, ...] = ()  # tokens that have to come next
        self._num_begun = 0  # tokens of the opening tag, where a grammar waits for what follows it
        self._may_open = True  # nothing of the answer has come yet
        self._claim()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Past tokens without an end among them.  Raises GrammarError where the answer breaks the grammar."""
        for token_id in token_ids:
            was_owed = bool(self._owed) and token_id == self._owed[0]
            was_outside = not self._meter.is_inside
            self._meter.advance([token_id])
            if was_owed:
                self._owed = self._owed[1:]
            elif self._grammar is not None:
                self._lead(self._grammar, token_id, was_outside=was_outside)
            self._claim()

    def allowed(self) -> Flags:  # [size]
        """The tokens that may come next."""
        if self._owed:
            return self._only(self._owed[0])
        if self._grammar is None:
            return np.ones(self._size, np.bool_)
        if self._meter.is_inside:
            found = np.ones(self._size, np.bool_)
            found[self._eos] = False
            return found
        begin = self._budget.tags.begin
        if self._num_begun:
            return self._only(begin[self._num_begun])
        found = self._grammar.allowed()
        found[begin[0]] |= self._may_open
        return found

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these, from the first, may come."""
        for place, flags in enumerate(self.allowed_behind(token_ids)[:-1]):
            if not flags[token_ids[place]]:
                return place
        return len(token_ids)

    def allowed_behind(self, token_ids: Sequence[int]) -> Flags:  # [len(token_ids) + 1, size]
        """The tokens allowed next, and after each of these tokens; after one that is not allowed, all are."""
        found = np.ones((len(token_ids) + 1, self._size), np.bool_)
        trial = self.copy()
        for place, token_id in enumerate(token_ids):
            found[place] = trial.allowed()
            if not found[place, token_id] or token_id in self._eos:
                return found
            trial.advance([token_id])
        found[-1] = trial.allowed()
        return found

    def copy(self) -> BudgetedAutomaton:
        grammar = None if self._grammar is None else self._grammar.copy()
        found = BudgetedAutomaton(self._budget, self._size, grammar, self._eos)
        found._meter, found._owed, found._num_begun = self._meter.copy(), self._owed, self._num_begun
        found._may_open = self._may_open
        return found

    def _lead(self, grammar: Automaton, token_id: int, *, was_outside: bool) -> None:
        if was_outside and not self._opens(token_id):
            grammar.advance([token_id])
        elif not was_outside and not self._meter.is_inside:  # what leads to the answer in this model's format
            self._owed = tuple(self._budget.tags.forced[len(self._budget.tags.ends[0]) :])

    def _opens(self, token_id: int) -> bool:
        """Whether it belongs to an opening tag in front of the answer."""
        begin = self._budget.tags.begin
        if self._num_begun or (self._may_open and token_id == begin[0]):
            self._num_begun = (self._num_begun + 1) % len(begin)
            return True
        self._may_open = False
        return False

    def _claim(self) -> None:
        """Demand the end where the budget is spent; what has been written of it is not demanded again."""
        if self._owed or not self._meter.is_inside or self._meter.num_tokens < self._budget.num_tokens:
            return
        forced = self._budget.tags.forced
        self._owed = tuple(forced[self._meter.num_begun(forced) :])

    def _only(self, token_id: int) -> Flags:  # [size]
        found = np.zeros(self._size, np.bool_)
        found[token_id] = True
        return found
