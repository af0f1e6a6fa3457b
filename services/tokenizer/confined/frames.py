"""The messages between a tokenizer and its children: length-prefixed JSON over pipes.

Clients' own JSON is part of them, with integers of any size, which MessagePack does not have.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from shared.requests.grammar import Grammar

PREFIX = struct.Struct("<I")
MOST_ESCAPED = 6  # bytes of JSON for one byte of a text: of a control character, while line breaks and quotes take two


class ChildSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame to a child, for its whole life.  Sizes in bytes."""

    max_memory: int
    max_cpu_seconds: int  # per job


class RenderSetup(ChildSetup, frozen=True, kw_only=True):
    """To a child that renders chats."""

    template: str
    tool_template: str  # of chats with tools
    special_tokens: dict[str, str]
    max_output_bytes: int


class RenderJob(msgspec.Struct, frozen=True):
    """One chat to render."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    now: float = 0.0  # Unix seconds: what the template takes for the present


class Rendering(msgspec.Struct, frozen=True):
    """A child's answer: the text, or what is wrong with the chat."""

    text: str = ""
    error: str = ""


class CompileJob(msgspec.Struct, frozen=True):
    """One grammar; None only asks whether the child is up."""

    grammar: Grammar | None
    max_seconds: float = 1.0  # of a processor: what takes longer to compile is longer to follow, too


class Compilation(msgspec.Struct, frozen=True):
    """A child's answer: the engine's text, or what is wrong with the grammar."""

    text: str = ""
    error: str = ""
    seconds: float = 0.0  # of a processor that it took


class EncodeSetup(ChildSetup, frozen=True, kw_only=True):
    """To a child that tokenizes."""

    tokenizer: str  # as its file has it


class EncodeJob(msgspec.Struct, frozen=True):
    """One text."""

    text: str
    add_special_tokens: bool = True


class Encoded(msgspec.Struct, frozen=True):
    """A child's answer: packed token ids, or what is wrong with the text."""

    token_ids: bytes = b""
    error: str = ""


# What `to_frame` raises: for half surrogates and for integers of more digits than Python writes, and for deep values.
UNSENDABLE = (ValueError, RecursionError)


def to_frame(content: msgspec.Struct) -> bytes:
    """Bytes with their length in front.  Raises UNSENDABLE."""
    data = msgspec.json.encode(content)
    return PREFIX.pack(len(data)) + data
