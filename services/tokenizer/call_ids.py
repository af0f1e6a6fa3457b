"""The ids of calls as a model's template wants them, whichever server made those that a chat has.

Most templates do not show them, or take any.  Some models were taught ids of a form of their own: Mistral's templates
refuse all others, and Kimi K2's shows no name of a called function but the one in the id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence

import msgspec

from shared.messages import ChatMessage, ToolCall

CHECKED = re.compile(r"(?:\b|_)id\b['\"\])\s]*\|\s*length\s*\)?\s*[!=]=\s*9\b")  # how Mistral's templates look at an id
NINE = re.compile(r"[A-Za-z0-9]{9}")
SHOWN_ALONE = "<|tool_call_argument_begin|>"  # what Kimi K2's template writes behind an id
NAMED = re.compile(r"functions\.(.+):\d+")

MakeId = Callable[[ToolCall, int], str]  # of a call that has so many before it in its chat


def ids_of(template: str) -> MakeId | None:
    """What makes the id that this template wants of a call; None where any will do."""
    if SHOWN_ALONE in template:
        return with_its_name
    return nine_characters if CHECKED.search(template) else None


def with_its_name(call: ToolCall, num_before: int) -> str:
    """Kimi K2's: `functions.NAME:0`, numbered through the chat, as the model writes them."""
    found = NAMED.fullmatch(call.id)
    return call.id if found is not None and found[1] == call.name else f"functions.{call.name}:{num_before}"


def nine_characters(call: ToolCall, _: int) -> str:
    """Mistral's: always the same for the same id.  A call without one stays so, and its template says what is wrong."""
    if not call.id or NINE.fullmatch(call.id):
        return call.id
    return hashlib.sha256(call.id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def with_ids(chat: Sequence[ChatMessage], make_id: MakeId) -> list[ChatMessage]:
    """The chat with other ids, calls and the messages that answer them alike."""
    known: dict[str, str] = {}
    found, num_calls = [], 0
    for message in chat:
        calls = []
        for call in message.tool_calls:
            known[call.id] = make_id(call, num_calls)
            calls.append(msgspec.structs.replace(call, id=known[call.id]))
            num_calls += 1
        answered = message.tool_call_id and known.get(message.tool_call_id, message.tool_call_id)
        found.append(msgspec.structs.replace(message, tool_calls=calls, tool_call_id=answered))
    return found
