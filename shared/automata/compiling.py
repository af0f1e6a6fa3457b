"""Compiles a client's grammar to the engine's format: for a process with limits."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from shared.automata.limits import GrammarError, in_words, parser_limits
from shared.requests.grammar import JSON_OPTIONS, MAX_CHOICES, MAX_COMPILED_BYTES, Grammar, GrammarKind

ANY_OBJECT = {"type": "object"}
GBNF_RULE = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)


class Compiler:
    """Compiles for a vocabulary of bytes, without the model's own."""

    def __init__(self) -> None:
        self._bytes = LLTokenizer("byte")

    def compile(self, grammar: Grammar) -> str:
        """The engine's text, checked.  Raises GrammarError where it is invalid or exceeds the limits."""
        text = _write(grammar)
        if len(text.encode("utf-8", "surrogatepass")) > MAX_COMPILED_BYTES:
            raise GrammarError(f"becomes more than MAX_COMPILED_BYTES={MAX_COMPILED_BYTES} bytes")
        matcher = LLMatcher(self._bytes, text, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"cannot be followed: {in_words(matcher.get_error())}")
        return text


def _write(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _write_schema(_decoded(grammar.text))
        case GrammarKind.JSON_OBJECT:
            return _write_schema(ANY_OBJECT)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_lark(_choices(_decoded(grammar.text)))
        case GrammarKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark(grammar.text))
        case GrammarKind.COMPILED:
            raise GrammarError("cannot be compiled again")


def _write_schema(schema: Any) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("must be a JSON schema that allows some value: an object, or true")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarError(f"is not a JSON schema: {in_words(str(error))}") from None


def _choices(choices: Any) -> str:
    """Lark's literals are JSON's strings."""
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError("must be a list of strings, none of them empty")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise GrammarError(f"must have from 1 to {MAX_CHOICES} choices, got {len(choices)}")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _lark(text: str) -> str:
    """GBNF is recognised by its arrows."""
    if not GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # a parser of its own kind of errors
        raise GrammarError(f"is not GBNF: {in_words(str(error))}") from None


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise GrammarError(f"is not JSON: {error}") from None
