"""A format that constrains a request's output: its kinds and limits."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shared.errors import RequestError

MAX_GRAMMAR_BYTES = 64 << 10  # of a schema, pattern, list of choices or grammar as it was sent
MAX_COMPILED_BYTES = 4 * MAX_GRAMMAR_BYTES  # of what the tokenizer makes of it
MAX_CHOICES = 4096

# JSON is written on one line, as json.dumps does: where any whitespace may come, a model in a loop writes
# only that.  What an engine calls this key a schema may have too; ours wins.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
OPTIONS_KEY = "x-guidance"


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # `text` is the schema
    JSON_OBJECT = "json_object"  # any JSON object; no text
    REGEX = "regex"  # `text` is matched whole
    CHOICE = "choice"  # `text` is a JSON list of strings, of which the output is one
    GRAMMAR = "grammar"  # `text` is Lark's or GBNF's notation
    COMPILED = "compiled"  # as the engine reads it; made by the tokenizer, never by a client


class Grammar(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One format; `field` is what the client calls it, for errors."""

    kind: GrammarKind
    text: str = ""
    field: str = "grammar"


def check_grammar(grammar: Grammar) -> None:
    """Raise RequestError where it is too long to be parsed, or is empty."""
    limit, name = MAX_GRAMMAR_BYTES, "MAX_GRAMMAR_BYTES"
    if grammar.kind is GrammarKind.COMPILED:
        limit, name = MAX_COMPILED_BYTES, "MAX_COMPILED_BYTES"
    if not grammar.text and grammar.kind is not GrammarKind.JSON_OBJECT:
        raise refusal(grammar, "must not be empty")
    if len(grammar.text) > limit or len(grammar.text.encode("utf-8", "surrogatepass")) > limit:
        raise refusal(grammar, f"has more than {name}={limit} bytes")


def refusal(grammar: Grammar, message: str) -> RequestError:
    return RequestError(f"{grammar.field} {message}", field=grammar.field)
