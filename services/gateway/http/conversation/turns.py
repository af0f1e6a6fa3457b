"""The messages of a chat, made from what other APIs send as items or blocks of their own."""

from __future__ import annotations

import msgspec

from services.gateway.http.conversation.prompt import ROLES
from services.gateway.http.requests.reading import field_error
from shared.messages import ChatMessage, ToolCall

ASSISTANT, TOOL, USER = "assistant", "tool", "user"


class ChatTurn(msgspec.Struct):
    """A message that may still grow; in pieces, so that many of them take linear time."""

    role: str
    name: str = ""  # of the function that a tool's message answers for
    call_id: str = ""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []

    @property
    def message(self) -> ChatMessage:
        content, reasoning = "\n".join(self.texts), "\n".join(self.thoughts)
        return ChatMessage(self.role, content, self.name, self.call_id, self.calls, reasoning)


class Turns:
    """Puts together what belongs to one message: an assistant's reasoning, words and calls.

    Invariant: `names[i]` is what the client calls the place where message i begins.
    """

    def __init__(self, *, merges: bool = False) -> None:
        """`merges`: what neighbours of the same role say is one message."""
        self.names: list[str] = []
        self._turns: list[ChatTurn] = []
        self._merges = merges
        self._functions: dict[str, str] = {}  # by the ids of their calls

    @property
    def messages(self) -> list[ChatMessage]:
        return [turn.message for turn in self._turns]

    @property
    def last(self) -> ChatTurn | None:
        return self._turns[-1] if self._turns else None

    def said(self, role: str, text: str, name: str) -> None:
        role = ROLES.get(role, role)
        self._open(role, name, begins_anew=True).texts.append(text)

    def thought(self, text: str, name: str) -> None:
        self._open(ASSISTANT, name, begins_anew=True).thoughts.append(text)

    def called(self, call_id: str, function: str, arguments: str, name: str) -> None:
        """`arguments`: JSON of an object."""
        self._functions[call_id] = function
        self._open(ASSISTANT, name, begins_anew=False).calls.append(ToolCall(call_id, function, arguments or "{}"))

    def answered(self, call_id: str, text: str, name: str) -> None:
        self._append(ChatTurn(TOOL, self._functions.get(call_id, ""), call_id, [text]), name)

    def check(self, field: str) -> None:
        """Raise RequestError, naming `field`, where nothing was said."""
        if not self._turns:
            raise field_error(field, "must contain at least one message")

    def _open(self, role: str, name: str, *, begins_anew: bool) -> ChatTurn:
        """The turn that grows: the last one, where that is of the same role and may go on.

        `begins_anew`: behind an assistant's words or calls these are another message, unless neighbours are merged.
        """
        last = self.last
        if last is not None and last.role == role:
            if self._merges and role in (ASSISTANT, USER):
                return last
            if role == ASSISTANT and not (begins_anew and (last.texts or last.calls)):
                return last
        return self._append(ChatTurn(role), name)

    def _append(self, turn: ChatTurn, name: str) -> ChatTurn:
        self._turns.append(turn)
        self.names.append(name)
        return turn
