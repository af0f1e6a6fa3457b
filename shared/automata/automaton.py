"""The state of one sequence in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shared.automata.limits import GrammarError, in_words, is_refused_token, parser_limits
from shared.automata.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Flags = NDArray[np.bool_]


class Automaton:
    """Follows tokens and says which may come next.  One thread at a time; its copies may run in others.

    Invariant: it has consumed tokens that its grammar allows, in order; an end of sequence is never consumed.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._bits = np.zeros(-(-vocabulary.size // 32), np.int32)

    def copy(self) -> Automaton:
        return Automaton(self.vocabulary, self._matcher.deep_copy())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Past tokens without an end among them.  Raises GrammarError where the grammar does not allow them; the
        automaton is of no use then."""
        if self._matcher.consume_tokens(list(token_ids)):
            return
        error = self._matcher.get_error()
        if error and not is_refused_token(error):
            raise GrammarError(f"cannot be followed any further: {in_words(error)}")
        raise GrammarError("cannot be kept: the request's other constraints forbid every token that it allows")

    def allowed(self) -> Flags:  # [vocabulary size]
        """The tokens that may come next; ends of sequence among them exactly where the grammar is complete."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise GrammarError(f"cannot be followed any further: {in_words(self._matcher.get_error())}")
        return np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self.vocabulary.size).view(np.bool_)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these, from the first, the grammar would allow."""
        return self._matcher.validate_tokens(list(token_ids))

    def allowed_behind(self, token_ids: Sequence[int]) -> Flags:  # [len(token_ids) + 1, vocabulary size]
        """The tokens allowed next, and after each of these tokens; after one that is not allowed, all are.

        The automaton stays where it is.
        """
        found = np.ones((len(token_ids) + 1, self.vocabulary.size), np.bool_)
        num_valid = self.num_valid(token_ids)
        found[0] = self.allowed()
        num_consumed = 0
        for token_id in token_ids[:num_valid]:
            if token_id in self.vocabulary.eos_token_ids:
                break
            self.advance([token_id])
            num_consumed += 1
            found[num_consumed] = self.allowed()
        if num_consumed and not self._matcher.rollback(num_consumed):
            raise GrammarError(f"cannot be followed any further: {in_words(self._matcher.get_error())}")
        return found


def make_automaton(vocabulary: Vocabulary, text: str) -> Automaton:
    """At the start of a compiled grammar.  Raises GrammarError."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.engine, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(f"cannot be followed: {in_words(matcher.get_error())}")
    return Automaton(vocabulary, matcher)
