"""Calls of tools as a grammar: what follows the opening that was put behind the prompt, for `tool_choice`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from services.gateway.http.chat.objects import FunctionBody
from services.gateway.http.parsing.parts import CallFormat
from services.gateway.http.requests.closed_objects import closed
from shared.errors import RequestError
from shared.grammar import JSON_OPTIONS, OPTIONS_KEY, Grammar, GrammarKind

MAX_CALLS = 16  # of one answer
NO_ARGUMENTS = {"type": "object", "properties": {}}  # a function without parameters has none, to OpenAI too
FIELD = "tools"


def named_call(form: CallFormat, function: FunctionBody, *, closes: bool = True) -> Grammar:
    """The arguments of one function, and how its call ends.  `closes`: objects have no properties that are not named,
    where the schema does not say otherwise."""
    rules = [f"start: a0 {_literal(form.after + form.end)}", _arguments(0, function, closes=closes)]
    return Grammar(GrammarKind.GRAMMAR, "\n".join(rules), FIELD)


def any_calls(form: CallFormat, functions: Sequence[FunctionBody], *, parallel: bool, closes: bool = True) -> Grammar:
    """One call, or several, from the first one's name on."""
    more = f" ({_literal(form.again)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    end = f" {_literal(form.end)}" if form.end else ""
    rules = [f"start: call{more}{end}", "call: " + " | ".join(f"c{place}" for place in range(len(functions)))]
    for place, function in enumerate(functions):
        head = json.dumps(function.name, ensure_ascii=False) + form.middle
        rules.append(f"c{place}: {_literal(head)} a{place} {_literal(form.after)}")
        rules.append(_arguments(place, function, closes=closes))
    return Grammar(GrammarKind.GRAMMAR, "\n".join(rules), FIELD)


def _arguments(place: int, function: FunctionBody, *, closes: bool) -> str:
    parameters = function.parameters or NO_ARGUMENTS
    try:
        schema = {**(closed(parameters) if closes else parameters), OPTIONS_KEY: JSON_OPTIONS}
        return f"a{place}: %json {json.dumps(schema)}"
    except RecursionError:
        raise RequestError(f"{FIELD}[{place}] has parameters that are nested too deeply", field=FIELD) from None


def _literal(text: str) -> str:
    """Lark's literals are JSON's strings."""
    return json.dumps(text, ensure_ascii=False)
