"""The format that a body asks for: one of response_format, structured_outputs and the guided_* fields, as a Grammar."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.http.requests.closed_objects import closed
from services.gateway.http.requests.fields import GenerationBody
from services.gateway.http.requests.reading import field_error
from shared.errors import RequestError
from shared.requests.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

GUIDED = {
    "guided_json": GrammarKind.JSON_SCHEMA,
    "guided_regex": GrammarKind.REGEX,
    "guided_choice": GrammarKind.CHOICE,
    "guided_grammar": GrammarKind.GRAMMAR,
    "grammar": GrammarKind.GRAMMAR,
    "json_schema": GrammarKind.JSON_SCHEMA,
}
STRUCTURED = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
    "json_object": GrammarKind.JSON_OBJECT,
}
CLOSES = "disable_additional_properties"  # of structured_outputs
NOT_KINDS = frozenset({CLOSES, "disable_any_whitespace"})  # the second is always so


def output_grammar(body: GenerationBody, *, closes: bool = False) -> Grammar | None:
    """`closes`: objects have no properties that a schema does not name (`closed_objects`).

    None where any text will do.  Raises RequestError where more than one format is asked for, or none we know."""
    asked = [(GUIDED[name], getattr(body, name), name) for name in GUIDED if getattr(body, name) not in (None, "")]
    found = [make_grammar(*one, closes=closes) for one in asked]
    if body.structured_outputs is not None:
        found.append(_structured(body.structured_outputs, closes=closes))
    if grammar := response_format(body.response_format, closes=closes):
        found.append(grammar)
    if len(found) > 1:
        fields = " and ".join(grammar.field for grammar in found)
        raise RequestError(f"{fields} cannot be given together: an answer has one format", field=found[1].field)
    return found[0] if found else None


def response_format(
    asked: dict[str, Any] | None, field: str = "response_format", *, closes: bool = False
) -> Grammar | None:
    """OpenAI's; the schema is in an object of its own in chats, and beside the type in responses."""
    if asked is None or asked.get("type") == "text":
        return None
    if asked.get("type") == "json_object" and asked.get("schema") is not None:  # llama.cpp's
        return make_grammar(GrammarKind.JSON_SCHEMA, asked["schema"], field, closes=closes)
    if asked.get("type") == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT, "", field)
    if asked.get("type") != "json_schema":
        raise RequestError(f"{field}.type must be text, json_object or json_schema", field=field)
    holder = asked.get("json_schema", asked)
    schema = holder.get("schema", holder.get("json_schema")) if isinstance(holder, dict) else None
    if schema is None:
        raise field_error(field, "has no schema")
    return make_grammar(GrammarKind.JSON_SCHEMA, schema, field, closes=closes)


def _structured(asked: Any, *, closes: bool) -> Grammar:
    """vLLM's: an object with one of the kinds."""
    field = "structured_outputs"
    if not isinstance(asked, dict):
        raise field_error(field, "must be an object")
    closes = bool(asked.get(CLOSES, closes))
    given = {name: value for name, value in asked.items() if value not in (None, False)}
    kinds = [name for name in given if name in STRUCTURED]
    if others := [name for name in given if name not in STRUCTURED and name not in NOT_KINDS]:
        raise RequestError(f"{field}.{others[0][:64]} is not supported by this server", field=field)
    if len(kinds) != 1:
        raise field_error(field, f"must have exactly one of {', '.join(STRUCTURED)}")
    return make_grammar(STRUCTURED[kinds[0]], given[kinds[0]], field, closes=closes)


def make_grammar(kind: GrammarKind, value: Any, field: str, *, closes: bool = False) -> Grammar:
    """Raises RequestError where `value` is not of the type that this kind has."""
    if closes and kind is GrammarKind.JSON_SCHEMA:
        value = _closed(value, field)
    match kind:
        case GrammarKind.JSON_OBJECT:
            return Grammar(kind, "", field)
        case GrammarKind.JSON_SCHEMA if isinstance(value, str):  # JSON already
            return Grammar(kind, value, field)
        case GrammarKind.JSON_SCHEMA if isinstance(value, dict | bool):
            return Grammar(kind, msgspec.json.encode(value).decode(), field)
        case GrammarKind.CHOICE if isinstance(value, list):
            return Grammar(kind, msgspec.json.encode(value).decode(), field)
        case GrammarKind.REGEX | GrammarKind.GRAMMAR if isinstance(value, str):
            return Grammar(kind, value, field)
    raise RequestError(f"{field}: a {kind} cannot be a {type(value).__name__}", field=field)


def _closed(schema: Any, field: str) -> Any:
    """What is no JSON is left for the compiler to refuse, and what is too long for the check of its length."""
    try:
        if len(schema if isinstance(schema, str) else msgspec.json.encode(schema)) > MAX_GRAMMAR_BYTES:
            return schema
        return closed(msgspec.json.decode(schema) if isinstance(schema, str) else schema)
    except msgspec.DecodeError:
        return schema
    except RecursionError:
        raise field_error(field, "is nested too deeply") from None
