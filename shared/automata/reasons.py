"""Why the engine cannot follow a grammar, in words for its author: the engine's own messages name its internals."""

from __future__ import annotations

import re

MAX_CHARS = 300
NEVER_ENDS = "NoExtensionBias"  # the engine's error for a rule that no text can satisfy
NOT_ALLOWED = re.compile(r"doesn't satisfy the grammar")
TOO_LARGE = re.compile(r"too (?:many|big|large|complex)|fuel|exceed|limit", re.IGNORECASE)
REGEX_ERROR = re.compile(r"invalid regex .*regex parse error:$")
LAST_REASON = re.compile(r"^error: (.+)$", re.MULTILINE)
SELF_REFERENCE = (
    "it refers to itself before it says anything: a $ref, or a rule, that leads back to itself with nothing in between "
    "has no end; put it below a property, an item or a literal, beside something that ends it"
)


def in_words(error: str) -> str:
    """One line about the grammar."""
    line = _first_line(error)
    if NEVER_ENDS in line:
        return SELF_REFERENCE
    if REGEX_ERROR.search(line) and (reason := LAST_REASON.search(error)):
        return f"{line.partition(' (in regex)')[0]}: {reason[1]}"[:MAX_CHARS]
    if TOO_LARGE.search(line):
        return f"it is too large: what may be written next takes more work than one format may ({line})"
    return line


def is_refused_token(error: str) -> bool:
    """Whether the grammar is valid, and a token was not allowed."""
    return bool(NOT_ALLOWED.search(_first_line(error)))


def _first_line(error: str) -> str:
    """Of the engine's message; what follows are its internals."""
    lines = error.strip().splitlines()
    return lines[0][:MAX_CHARS] if lines else "the engine gives no reason"
