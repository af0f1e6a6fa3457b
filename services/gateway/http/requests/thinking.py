"""How long an answer may reason, as clients ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.http.parsing.registry import THINKS, begins_inside, make_reasoning_parser
from services.gateway.http.requests.formats import AnswerFormats
from services.gateway.http.requests.reading import field_error
from shared.requests.reasoning import ThinkingBudget

FIELD = "thinking_token_budget"  # vLLM's
VARIABLE = "thinking_budget"  # Qwen's, of the chat template
DEMAND = "tool_choice"
UNLIMITED = -1
MAX_BUDGET = (1 << 31) - 1


def thinking_budget(
    formats: AnswerFormats, given: int | None, variables: Mapping[str, Any] | None = None
) -> ThinkingBudget | None:
    """vLLM's field, else Qwen's variable.  None where neither is given.  Raises RequestError where the field cannot be
    served; templates may have a use of their own for the variable."""
    if given is not None:
        return read_budget(formats, given, FIELD, variables)
    named = (variables or {}).get(VARIABLE)
    if formats.tags is None or named is None:
        return None
    field = f"chat_template_kwargs.{VARIABLE}"
    if not isinstance(named, int) or isinstance(named, bool):
        raise field_error(field, f"must be a whole number, got {str(named)[:32]!r}")
    return read_budget(formats, named, field, variables)


def unlimited_thinking(formats: AnswerFormats, variables: Mapping[str, Any]) -> ThinkingBudget | None:
    """Reasoning of any length, before what the output is held to.  None where the model's format has none, or the
    template's `variables` turn it off."""
    is_off = any(variables.get(name) is False for name in THINKS) or variables.get("reasoning_effort") == "none"
    if formats.tags is None or is_off or make_reasoning_parser(formats.reasoning, variables) is None:
        return None
    return ThinkingBudget(formats.tags, MAX_BUDGET, begins_inside(formats.reasoning, variables), DEMAND)


def as_the_prompt_ends(budget: ThinkingBudget | None) -> ThinkingBudget | None:
    """For a prompt that no template wrote: whether it ends within reasoning is seen from its tokens alone."""
    return None if budget is None else msgspec.structs.replace(budget, is_open=False)


def read_budget(
    formats: AnswerFormats, given: int, field: str, variables: Mapping[str, Any] | None = None
) -> ThinkingBudget | None:
    """None without a limit."""
    if given == UNLIMITED:
        return None
    if formats.tags is None:
        raise field_error(
            field,
            "is not possible: the server has no reasoning_parser, or the tags that open and close reasoning are not "
            "tokens of the model's tokenizer",
        )
    if not 0 <= given <= MAX_BUDGET:
        raise field_error(field, f"must be a non-negative integer, or -1 for no limit, got {given}")
    return ThinkingBudget(formats.tags, given, begins_inside(formats.reasoning, variables), field)
