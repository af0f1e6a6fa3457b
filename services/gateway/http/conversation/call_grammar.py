"""Calls of tools as a grammar, for `tool_choice`: what follows the opening that was put behind the prompt.

The opening is part of it where the model thinks before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from services.gateway.http.conversation.objects import FunctionBody
from services.gateway.http.parsing.reading.parts import ArgumentStyle, CallFormat
from services.gateway.http.parsing.reading.values import is_always_text, types_of
from services.gateway.http.requests.closed_objects import closed
from services.gateway.http.requests.reading import field_error
from shared.errors import RequestError
from shared.requests.grammar import JSON_OPTIONS, MAX_GRAMMAR_BYTES, OPTIONS_KEY, Grammar, GrammarKind, check_grammar

MAX_CALLS = 16  # of one answer
MAX_GAP = 4  # characters
NUMBER = "/[0-9]{1,4}/"  # of a call in its conversation
NO_ARGUMENTS = {"type": "object", "properties": {}}  # a function without parameters has none, to OpenAI too
FIELD = "tools"


def named_call(form: CallFormat, function: FunctionBody, *, closes: bool = True, opening: str = "") -> Grammar:
    """The arguments of one function, and how its call ends.  `closes`: objects have no properties that are not named,
    where the schema does not say otherwise; `opening`: what comes before, where the prompt does not have it."""
    start = f"start:{_opened(opening)} a0{_literal(form.after + form.end)}"
    return _grammar(chain([start], _arguments(form, 0, function, closes=closes)))


def any_calls(
    form: CallFormat, functions: Sequence[FunctionBody], *, parallel: bool, closes: bool = True, opening: str = ""
) -> Grammar:
    """One call, or several, from the first one's name on; `opening`: what comes before, as in `named_call`."""
    more = f" ({_literal(form.again)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""

    def rules() -> Iterator[str]:
        yield f"start:{_opened(opening)} call{more}{_literal(form.end)}"
        yield "call: " + " | ".join(f"c{place}" for place in range(len(functions)))
        for place, function in enumerate(functions):
            yield f"c{place}:{_head(form, function.name)} a{place}{_literal(form.after)}"
            yield from _arguments(form, place, function, closes=closes)

    return _grammar(rules())


def check_parameters(tools: Sequence[dict[str, Any]], named: str) -> None:
    """Raise RequestError where the parameters of the functions of which a call is demanded are together longer than a
    grammar may be: before they are walked, since all streams wait for that.  `named`: the only such function."""
    size = 0
    for place, tool in enumerate(tools):
        function, field = tool["function"], f"{FIELD}[{place}].function.parameters"
        if named not in ("", function["name"]):
            continue
        try:
            size += len(msgspec.json.encode(function.get("parameters")))
        except RecursionError:
            raise field_error(field, "is nested too deeply") from None
        if size > MAX_GRAMMAR_BYTES:
            most = f"MAX_GRAMMAR_BYTES={MAX_GRAMMAR_BYTES}"
            raise field_error(field, f"has with those before it {size} bytes, more than {most}")


def _grammar(rules: Iterable[str]) -> Grammar:
    """Raises RequestError where the rules are longer than a grammar may be; no more of them are made then."""
    made: list[str] = []
    size = -1  # a line has a newline before it, the first has none
    for rule in rules:
        made.append(rule)
        size += 1 + len(rule)
        if size > MAX_GRAMMAR_BYTES:
            break
    grammar = Grammar(GrammarKind.GRAMMAR, "\n".join(made), FIELD)
    check_grammar(grammar)
    return grammar


def _arguments(form: CallFormat, place: int, function: FunctionBody, *, closes: bool) -> Iterator[str]:
    """The rules of one function's arguments, of which the first is `a` and its place."""
    parameters = function.parameters or NO_ARGUMENTS
    try:
        schema = closed(parameters) if closes else parameters
        if form.style is not None:
            yield from _styled(form.style, f"a{place}", schema)
        else:
            yield f"a{place}: {_json(schema)}"
    except RecursionError:
        raise RequestError(f"{FIELD}[{place}] has parameters that are nested too deeply", field=FIELD) from None


def _styled(style: ArgumentStyle, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Arguments one by one, in the schema's order: `f` rules for those of which none was written before, `r` for the
    others.  Those that are not required may be left out."""
    properties = schema.get("properties")
    wanted = dict(properties) if isinstance(properties, Mapping) else {}
    needed = {key for key in _listed(schema, "required") if isinstance(key, str)}
    yield f"{name}: {name}f0"
    for number, (key, inner) in enumerate(wanted.items()):
        may_miss = "" if key in needed else " | "
        first, rest = (f"{name}f{number + 1}", f"{name}r{number + 1}")
        item = f"{name}i{number}"
        yield f"{name}f{number}: {item} {rest}" + (may_miss and may_miss + first)
        yield f"{name}r{number}:{_literal(style.between)} {item} {rest}" + (may_miss and may_miss + rest)
        yield from _argument(style, item, key, inner, schema)
    yield f'{name}f{len(wanted)}: ""'
    yield f'{name}r{len(wanted)}: ""'


def _argument(style: ArgumentStyle, name: str, key: str, schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """The rules of one argument with its key, of which the first is called `name`."""
    inner = dict(schema) if isinstance(schema, Mapping) else {}
    if style.text_ends and is_always_text(types_of(inner, root)):
        head = f"{name}:{_literal(style.before_key + key + style.before_text)}"
        if options := _listed(inner, "enum"):
            yield f"{head} ({' |'.join(_literal(str(one)) for one in options)}){_literal(style.after_text)}"
            return
        yield f"{head} {name}t"
        yield f"{name}t[suffix={json.dumps(style.after_text, ensure_ascii=False)}]: /(?s:.*)/"  # the first one ends it
        return
    value = _json(inner | {one: root[one] for one in ("$defs", "definitions") if one in root})
    yield f"{name}:{_literal(style.before_key + key + style.before_value)} {value}{_literal(style.after_value)}"


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a key of a client's schema; anything else there demands nothing."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, OPTIONS_KEY: JSON_OPTIONS})}"


def _opened(opening: str) -> str:
    """Models leave lines free between their reasoning and a call."""
    return f" /[ \\n]{{0,{MAX_GAP}}}/{_literal(opening)}" if opening else ""


def _head(form: CallFormat, name: str) -> str:
    """What stands before the arguments of a call; the model says which call of the conversation it is."""
    if form.number:
        return f"{_literal(form.name(name) + form.number)} {NUMBER}{_literal(form.middle)}"
    return _literal(form.head(name, 0))


def _literal(text: str) -> str:
    """Lark's literals are JSON's strings; nothing where there is no text."""
    return f" {json.dumps(text, ensure_ascii=False)}" if text else ""
