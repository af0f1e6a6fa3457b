"""From a chat's body to what is rendered: messages, tools, and how the answer has to begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any

import msgspec

from services.gateway.http.chat.call_grammar import any_calls, named_call
from services.gateway.http.chat.objects import ChatBody, ContentPart, FunctionBody, MessageBody, NamedChoice, ToolBody
from services.gateway.http.parsing.calls import CallParser
from services.gateway.http.requests.reading import not_valid
from shared.errors import RequestError
from shared.grammar import Grammar
from shared.messages import ChatMessage, ChatOptions, ToolCall

TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = {"developer": "system"}  # OpenAI's newer name, which templates do not know
MAX_TOOLS = 256


def read_messages(messages: Sequence[MessageBody], name_of: Callable[[int], str]) -> list[ChatMessage]:
    """Raises RequestError on content that is not text; `name_of` says what the client calls the message at a place."""
    if not messages:
        field = name_of(0).partition("[")[0]
        raise RequestError(f"{field} must contain at least one message", field=field)
    return [_message(message, name_of(place)) for place, message in enumerate(messages)]


def _message(message: MessageBody, field: str) -> ChatMessage:
    return ChatMessage(
        role=ROLES.get(message.role, message.role),
        content=_content(message.content, f"{field}.content"),
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        tool_calls=[
            ToolCall(call.id or "", call.function.name, call.function.arguments or "{}")
            for call in message.tool_calls or ()
        ],
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _content(content: str | list[ContentPart] | None, field: str) -> str:
    if isinstance(content, str):
        return content
    for place, part in enumerate(content or ()):
        if part.type not in TEXT_PARTS or part.text is None:
            field = f"{field}[{place}]"
            raise RequestError(f"{field} is a part of type {part.type[:32]!r}; only text can be read", field=field)
    return "\n".join(part.text or "" for part in content or ())


class ToolUse:
    """Whether and how tools may be called in one answer.  Raises RequestError where that is not possible here.

    Where a call is demanded, the answer is begun for the model (`opening`), and held to what may follow (`grammar`).
    """

    def __init__(self, body: ChatBody, parser: CallParser | None, *, closes: bool = True) -> None:
        """`closes`: a demanded call's arguments have no properties that its schema does not name."""
        choice = "auto" if body.tool_choice is None else body.tool_choice
        self.tools = body.tools or []
        self.named = choice.function.name if isinstance(choice, NamedChoice) else ""
        self.parallel = body.parallel_tool_calls is not False
        functions = _functions(self.tools)
        if isinstance(choice, str):
            _check_choice(choice, functions)
        elif self.named not in functions:
            raise RequestError(f"tool_choice names {self.named[:64]!r}, which is not among tools", field="tool_choice")
        self.offered = bool(self.tools) and choice != "none"
        if self.offered and parser is None:
            raise RequestError(
                "tools cannot be called: the server was started without tool_call_parser, which says in what format "
                "the model calls them",
                field="tools",
            )
        self.opening = ""
        self.grammar: Grammar | None = None
        if parser is not None and self.named:
            self.opening = parser.opening(self.named)
            self.grammar = named_call(parser.form, functions[self.named], closes=closes)
        elif parser is not None and choice == "required":
            self.opening = parser.form.begin
            self.grammar = any_calls(parser.form, list(functions.values()), parallel=self.parallel, closes=closes)


def _functions(tools: Sequence[dict[str, Any]]) -> dict[str, FunctionBody]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries, more than {MAX_TOOLS}", field="tools")
    functions = {}
    for place, tool in enumerate(tools):
        try:
            read = msgspec.convert(tool, ToolBody)
        except msgspec.ValidationError as error:
            raise not_valid(error, f"tools[{place}]") from None
        if read.type != "function":
            field = f"tools[{place}].type"
            raise RequestError(f"{field} is {read.type[:32]!r}; only functions can be called", field=field)
        functions[read.function.name] = read.function
    return functions


def _check_choice(choice: str, functions: Sized) -> None:
    if choice == "required" and not functions:
        raise RequestError("tool_choice is 'required', but there are no tools", field="tool_choice")
    if choice not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice must be auto, none, required or a function, got {choice[:32]!r}", field="tool_choice"
        )


def chat_options(body: ChatBody, use: ToolUse) -> ChatOptions:
    """What is rendered beside the messages."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return ChatOptions(
        tools=msgspec.json.encode(use.tools).decode() if use.offered else "",
        template_args=msgspec.json.encode(variables).decode() if variables else "",
        add_generation_prompt=begins_a_message(body),
        continue_final_message=bool(body.continue_final_message),
        opening=use.opening,
    )


def begins_a_message(body: ChatBody) -> bool:
    """Whether the answer is a message of its own, and does not go on with the last one."""
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


def echoed(body: ChatBody, messages: Sequence[ChatMessage]) -> str:
    """What an answer shows before its own words where that is wanted: the last message, if it is of the same role."""
    is_of_same_role = messages[-1].role == "assistant" or not begins_a_message(body)
    return messages[-1].content if body.echo and is_of_same_role else ""
