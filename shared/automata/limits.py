"""How much work one grammar may be, in the tokenizer's child and in workers, and errors in words for its author."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a worker that no request asks for a format does not load the engine
    from llguidance import LLParserLimits

MAX_CHARS = 300
NEVER_ENDS = "NoExtensionBias"  # the engine's error for a rule that no text can satisfy
NOT_ALLOWED = re.compile(r"doesn't satisfy the grammar")
TOO_LARGE = re.compile(r"too (?:many|big|large|complex)|fuel|exceed|limit", re.IGNORECASE)
REGEX_ERROR = re.compile(r"invalid regex .*regex parse error:$")
LAST_REASON = re.compile(r"^error: (.+)$", re.MULTILINE)
SELF_REFERENCE = (
    "it refers to itself before any text: a $ref, or a rule, that leads back to itself with nothing in between never "
    "ends; put it below a property, an item or a literal, next to an alternative that ends"
)


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


def in_words(error: str) -> str:
    """One line about the grammar."""
    line = _first_line(error)
    if NEVER_ENDS in line:
        return SELF_REFERENCE
    if REGEX_ERROR.search(line) and (reason := LAST_REASON.search(error)):
        return f"{line.partition(' (in regex)')[0]}: {reason[1]}"[:MAX_CHARS]
    if TOO_LARGE.search(line):
        return f"it is too large: finding the text that may come next takes more work than one format may use ({line})"
    return line


def is_refused_token(error: str) -> bool:
    """Whether the grammar is well, and a token was none that it allows."""
    return bool(NOT_ALLOWED.search(_first_line(error)))


def _first_line(error: str) -> str:
    """Of the engine's message; what follows are its internals."""
    lines = error.strip().splitlines()
    return lines[0][:MAX_CHARS] if lines else "the engine gives no reason"
