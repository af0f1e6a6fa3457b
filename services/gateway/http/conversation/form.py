"""A conversation: the one form into which every front brings its body, and from which prompt and reader are made."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.http.conversation.prompt import ToolUse
from services.gateway.http.conversation.reader import AnswerReader
from services.gateway.http.parsing.registry import (
    OutputParser,
    begins_inside,
    make_reasoning_parser,
    make_tool_parser,
)
from services.gateway.http.requests.formats import AnswerFormats
from shared.messages import ChatMessage, ChatOptions
from shared.requests.reasoning import ReasoningMeter, ThinkingBudget


class Conversation(msgspec.Struct, kw_only=True):
    """What is said to the model, and how its answer is to be read.

    Fronts differ in how they read a body into it and in how they show what the reader finds; nothing between knows
    which of them it was.
    """

    messages: list[ChatMessage]
    names: list[str] = []  # what the client calls the place where each of them begins
    tools: ToolUse
    variables: dict[str, Any] = {}  # of the template
    begins_a_message: bool = True  # the answer is a message of its own
    continues_the_last: bool = False  # the last message stays open, and the answer goes on within it
    shows_reasoning: bool = True
    thinking: ThinkingBudget | None = None

    @property
    def options(self) -> ChatOptions:
        """What is rendered beside the messages."""
        return ChatOptions(
            tools=msgspec.json.encode(self.tools.tools).decode() if self.tools.offered else "",
            template_args=msgspec.json.encode(self.variables).decode() if self.variables else "",
            add_generation_prompt=self.begins_a_message,
            continue_final_message=self.continues_the_last,
            opening=self.tools.opening,
        )

    @property
    def sampling(self) -> dict[str, Any]:
        """What calls and reasoning demand of the output, whatever else is asked of it."""
        found: dict[str, Any] = {}
        if self.tools.keeps_special_tokens:
            found["skip_special_tokens"] = False
        if self.tools.grammar is not None:
            found["grammar"] = self.tools.grammar
        thinking = self.tools.thinking if self.thinking is None else self.thinking
        if thinking is not None and not self.tools.opening:  # a call that was begun is not thought about
            found["thinking"] = thinking
        return found

    def reader(self, formats: AnswerFormats) -> AnswerReader:
        """A reader for one sequence; a call that was begun for the model is read from its beginning."""
        tools = self.tools
        parser = OutputParser(
            None if tools.opening else make_reasoning_parser(formats.reasoning, self.variables),
            make_tool_parser(formats.tools, tools.schemas) if tools.offered else None,
        )
        begun = parser.feed(tools.opening) if tools.opening else []
        meter = None
        if formats.tags is not None:
            inside = not tools.opening and begins_inside(formats.reasoning, self.variables)
            meter = ReasoningMeter(formats.tags, is_inside=inside)
        return AnswerReader(
            parser,
            parallel=tools.parallel,
            reasoning=self.shows_reasoning,
            demands_call=tools.grammar is not None,
            meter=meter,
            begun=begun,
        )
