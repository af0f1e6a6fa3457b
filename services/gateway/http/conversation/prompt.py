"""From a body's messages and tools to what is rendered, and to how the answer has to begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from services.gateway.http.conversation.call_grammar import any_calls, check_parameters, named_call
from services.gateway.http.conversation.objects import ContentPart, FunctionBody, MessageBody, NamedChoice, ToolBody
from services.gateway.http.parsing.registry import IN_SPECIAL_TOKENS, make_tool_parser
from services.gateway.http.requests.formats import AnswerFormats
from services.gateway.http.requests.reading import converted, field_error
from services.gateway.http.requests.thinking import unlimited_thinking
from shared.messages import ChatMessage, ToolCall
from shared.requests.grammar import Grammar
from shared.requests.reasoning import ThinkingBudget

TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = {"developer": "system"}  # OpenAI's newer name, which templates do not know
MAX_TOOLS = 256


def read_messages(messages: Sequence[MessageBody]) -> list[ChatMessage]:
    """A body's `messages`.  Raises RequestError on content that is not text."""
    if not messages:
        raise field_error("messages", "must contain at least one message")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: MessageBody, field: str) -> ChatMessage:
    return ChatMessage(
        role=ROLES.get(message.role, message.role),
        content=content_of(message.content, f"{field}.content"),
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        tool_calls=[
            ToolCall(call.id or "", call.function.name, call.function.arguments or "{}")
            for call in message.tool_calls or ()
        ],
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def content_of(content: str | Sequence[ContentPart] | None, field: str) -> str:
    """The text of a content, each part in lines of its own.  Raises RequestError on a part that is not text."""
    if isinstance(content, str):
        return content
    for place, part in enumerate(content or ()):
        if part.type not in TEXT_PARTS or part.text is None:
            raise field_error(f"{field}[{place}]", f"is a part of type {part.type[:32]!r}; only text can be read")
    return "\n".join(part.text or "" for part in content or ())


class ToolUse:
    """Whether and how tools may be called in one answer.  Raises RequestError where that is not possible here.

    Where a call is demanded, the answer is begun for the model (`opening`), and held to what may follow (`grammar`).
    Where the model thinks before, nothing is begun for it: the grammar holds what follows its reasoning.
    """

    def __init__(
        self,
        formats: AnswerFormats,
        tools: Sequence[dict[str, Any]],
        choice: str | NamedChoice | None,
        *,
        parallel: bool,
        variables: Mapping[str, Any] | None,
        said: Sequence[ChatMessage] = (),
    ) -> None:
        """`tools` as chats have them; `parallel`: an answer may have several calls; `variables`: the template's, None
        where a demanded call is not thought about; `said`: the chat so far, whose calls some formats count."""
        parser = make_tool_parser(formats.tools)
        choice = "auto" if choice is None else choice
        self.tools = tools
        self.named = choice.function.name if isinstance(choice, NamedChoice) else ""
        self.parallel = parallel
        functions = _functions(self.tools)
        if isinstance(choice, str):
            _check_choice(choice, functions)
        elif self.named not in functions:
            raise field_error("tool_choice", f"names {self.named[:64]!r}, which is not among tools")
        self.schemas = {name: function.parameters or {} for name, function in functions.items()}
        self.offered = bool(self.tools) and choice != "none"
        if self.offered and parser is None:
            raise field_error(
                "tools",
                "cannot be called: the server was started without tool_call_parser, which says in what format the "
                "model calls them",
            )
        self.keeps_special_tokens = formats.reasoning in IN_SPECIAL_TOKENS or (
            self.offered and parser is not None and parser.keeps_special_tokens
        )
        self.thinking: ThinkingBudget | None = None  # before the call that is demanded
        self.opening = ""
        self.grammar: Grammar | None = None
        if parser is None or not (self.named or choice == "required"):
            return
        check_parameters(self.tools, self.named)
        num_calls = sum(len(message.tool_calls) for message in said)
        opening = parser.opening(self.named, num_calls) if self.named else parser.form.begin
        # A format's special tokens are no text that a grammar could name.
        if opening and variables is not None and not self.keeps_special_tokens:
            self.thinking = unlimited_thinking(formats, variables)
        self.opening, inner = (opening, "") if self.thinking is None else ("", opening)
        if self.named:
            self.grammar = named_call(parser.form, functions[self.named], closes=formats.closes_tools, opening=inner)
        else:
            wanted, closes = list(functions.values()), formats.closes_tools
            self.grammar = any_calls(parser.form, wanted, parallel=parallel, closes=closes, opening=inner)


def _functions(tools: Sequence[dict[str, Any]]) -> dict[str, FunctionBody]:
    if len(tools) > MAX_TOOLS:
        raise field_error("tools", f"has {len(tools)} entries, more than {MAX_TOOLS}")
    functions = {}
    for place, tool in enumerate(tools):
        read = converted(tool, ToolBody, f"tools[{place}]")
        if read.type != "function":
            raise field_error(f"tools[{place}].type", f"is {read.type[:32]!r}; only functions can be called")
        functions[read.function.name] = read.function
    return functions


def _check_choice(choice: str, functions: Sized) -> None:
    if choice == "required" and not functions:
        raise field_error("tool_choice", "is 'required', but there are no tools")
    if choice not in ("auto", "none", "required"):
        raise field_error("tool_choice", f"must be auto, none, required or a function, got {choice[:32]!r}")
