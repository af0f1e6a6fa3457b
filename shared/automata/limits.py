"""How much work one grammar may be: what the check in the tokenizer's child and the workers' automata both keep to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a worker that no request asks for a format does not load the engine
    from llguidance import LLParserLimits


class GrammarError(Exception):
    """A grammar that cannot be followed, or tokens that it does not allow; says why in words for its author."""


def parser_limits() -> LLParserLimits:
    """Counts of the engine's own: about 15 ms for one mask, 20 ms for the lexer's start, 30 MB for its states."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=16_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # they would quote grammar and output
    )
