"""What a tokenizer and its children say to each other: length-prefixed msgpack over pipes."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from shared.grammar import Grammar

PREFIX = struct.Struct("<I")


class RenderSetup(msgspec.Struct, frozen=True):
    """The first frame to a child, for its whole life.  Sizes in bytes, times in seconds."""

    template: str
    tool_template: str  # of chats with tools; empty: the same
    special_tokens: dict[str, str]
    max_output_bytes: int
    max_memory: int
    max_cpu_seconds: int  # per rendering


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


class CompileSetup(msgspec.Struct, frozen=True):
    """The first frame to a child that compiles grammars."""

    max_memory: int
    max_cpu_seconds: int  # per grammar


class CompileJob(msgspec.Struct, frozen=True):
    """One grammar; None only asks whether the child is up."""

    grammar: Grammar | None
    max_seconds: float = 1.0  # of a processor: what takes longer to compile is longer to follow, too


class Compilation(msgspec.Struct, frozen=True):
    """A child's answer: the engine's text, or what is wrong with the grammar."""

    text: str = ""
    error: str = ""
    seconds: float = 0.0  # of a processor that it took


class EncodeSetup(msgspec.Struct, frozen=True):
    """The first frame to a child that tokenizes."""

    tokenizer: str  # as its file has it
    max_memory: int
    max_cpu_seconds: int  # per text


class EncodeJob(msgspec.Struct, frozen=True):
    """One text."""

    text: str
    add_special_tokens: bool = True


class Encoded(msgspec.Struct, frozen=True):
    """A child's answer: packed token ids, or what is wrong with the text."""

    token_ids: bytes = b""
    error: str = ""


def to_frame(content: msgspec.Struct) -> bytes:
    """Bytes with their length in front."""
    data = msgspec.msgpack.encode(content)
    return PREFIX.pack(len(data)) + data
