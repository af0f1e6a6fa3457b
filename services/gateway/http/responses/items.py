"""From the items and tools of /v1/responses to a chat's messages and tools, and back to the names of functions."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.gateway.http.conversation.objects import FunctionName, NamedChoice
from services.gateway.http.conversation.prompt import MAX_TOOLS, content_of
from services.gateway.http.conversation.turns import Turns
from services.gateway.http.requests.reading import converted, field_error
from services.gateway.http.responses.inputs import AllowedTools, FunctionTool, InputItem, NamedTool, Namespace
from shared.errors import RequestError

BETWEEN = "__"  # a namespace and its function: names of functions have no dots everywhere
NOT_READ = "; messages, reasoning, function calls and their outputs can be read"


def read_items(items: Sequence[InputItem], name_of: Callable[[int], str], turns: Turns) -> None:
    """Add the items to `turns`; `name_of` says what the client calls the item at a place.

    Raises RequestError on an item that is none of a chat."""
    for place, item in enumerate(items):
        field = name_of(place)
        match item.type:
            case "message":
                if item.role is None:
                    raise RequestError(f"{field} has no role", field=f"{field}.role")
                turns.said(item.role, content_of(item.content, f"{field}.content"), field)
            case "reasoning":
                if thought := _thought(item, field):
                    turns.thought(thought, field)
            case "function_call":
                name = joined(item.namespace or "", given(item.name, f"{field}.name"))
                turns.called(given(item.call_id, f"{field}.call_id"), name, item.arguments or "", field)
            case "function_call_output":
                text = content_of(item.output, f"{field}.output")
                turns.answered(given(item.call_id, f"{field}.call_id"), text, field)
            case _:
                raise field_error(field, f"is of type {item.type[:32]!r}{NOT_READ}")


def given(text: str | None, field: str) -> str:
    if not text:
        raise field_error(field, "is missing")
    return text


def _thought(item: InputItem, field: str) -> str:
    """What the model thought: in words, as `sealed` gave it to the client, or as another server summed it up."""
    if item.encrypted_content and not item.content:
        return unsealed(item.encrypted_content, f"{field}.encrypted_content")
    if item.summary and not item.content:
        return "\n".join(part.text or "" for part in item.summary)
    parts = item.content if isinstance(item.content, list) else []
    for place, part in enumerate(parts):
        if part.type != "reasoning_text":
            raise field_error(f"{field}.content[{place}]", f"is a part of type {part.type[:32]!r}, not reasoning_text")
    return "".join(part.text or "" for part in parts) if parts else str(item.content or "")


def sealed(text: str) -> str:
    """Reasoning for a client that keeps its conversation itself: encoded, so that it comes back as it was.  It is no
    secret from that client, which has the same text beside it."""
    return urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def unsealed(text: str, field: str) -> str:
    try:
        return urlsafe_b64decode(text.encode()).decode()  # half a surrogate pair is no text to the other services
    except (binascii.Error, ValueError):
        raise field_error(field, "was not made by this server") from None


# -- tools


def joined(namespace: str, name: str) -> str:
    return f"{namespace}{BETWEEN}{name}" if namespace else name


class ResponseTools:
    """The functions that a body offers.  Raises RequestError on tools of other types, by name."""

    def __init__(self, tools: Sequence[dict[str, Any]], choice: Any) -> None:
        self.chat_tools: list[dict[str, Any]] = []
        self._names: dict[str, tuple[str, str]] = {}  # (namespace, name) by the name that the model sees
        if len(tools) > MAX_TOOLS:
            raise field_error("tools", f"has {len(tools)} entries, more than {MAX_TOOLS}")
        for namespace, tool in _functions(tools):
            name = joined(namespace, tool.name)
            self._names[name] = (namespace, tool.name)
            function = {"name": name, "description": tool.description, "parameters": tool.parameters}
            present = {key: value for key, value in function.items() if value is not None}
            self.chat_tools.append({"type": "function", "function": present})
        self.choice = self._read_choice(choice)

    def names(self, function: str) -> tuple[str, str]:
        """Namespace and name of a function that the model has called."""
        return self._names.get(function, ("", function))

    def _read_choice(self, choice: Any) -> str | NamedChoice | None:
        """A chat's; where a choice allows some of the tools, the others are not offered."""
        if choice is None or isinstance(choice, str):
            return choice
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "function":
            named = converted(choice, NamedTool, "tool_choice")
            return NamedChoice(function=FunctionName(name=joined(named.namespace or "", named.name)))
        if kind == "allowed_tools":
            return self._allow(converted(choice, AllowedTools, "tool_choice"))
        raise field_error(
            "tool_choice", f"is of type {str(kind)[:32]!r}; it can be auto, none, required, a function or allowed_tools"
        )

    def _allow(self, allowed: AllowedTools) -> str:
        names = {joined(tool.namespace or "", tool.name) for tool in allowed.tools}
        if unknown := names - self._names.keys():
            raise field_error("tool_choice", f"allows {min(unknown)[:64]!r}, which is not among tools")
        self.chat_tools = [tool for tool in self.chat_tools if tool["function"]["name"] in names]
        return allowed.mode


def _functions(
    tools: Sequence[dict[str, Any]], within: str = "tools", namespace: str = ""
) -> Iterator[tuple[str, FunctionTool]]:
    """(namespace, function) of each."""
    for place, tool in enumerate(tools):
        field = f"{within}[{place}]"
        kind = tool.get("type")
        if kind == "function":
            function = converted(tool, FunctionTool, field)
            _check_function(function, field)
            yield namespace, function
        elif kind == "namespace" and not namespace:
            space = converted(tool, Namespace, field)
            yield from _functions(space.tools, f"{field}.tools", space.name)
        else:
            raise field_error(f"{field}.type", f"is {str(kind)[:32]!r}; only functions can be called")


def _check_function(function: FunctionTool, field: str) -> None:
    for name in ("defer_loading", "async_"):
        if getattr(function, name):
            raise field_error(f"{field}.{name.rstrip('_')}", "is not supported by this server")
    if function.allowed_callers not in (None, ["direct"]):
        raise field_error(f"{field}.allowed_callers", "can only be direct")
