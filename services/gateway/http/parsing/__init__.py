"""What a model's text says in the format it was trained on: reasoning, calls of tools, and the rest.

Parsers read text as it comes.  What they put out depends on the text alone, never on where it was cut; they work in
time linear in it, without backtracking, and no text makes them fail: what is no call after all is content.
"""

from __future__ import annotations

from services.gateway.http.parsing.output import OutputParser
from services.gateway.http.parsing.parts import CallArguments, CallBegun, Content, Part, Reasoning
from services.gateway.http.parsing.registry import TOOL_PARSERS, make_reasoning_parser, make_tool_parser

__all__ = [
    "TOOL_PARSERS",
    "CallArguments",
    "CallBegun",
    "Content",
    "OutputParser",
    "Part",
    "Reasoning",
    "make_reasoning_parser",
    "make_tool_parser",
]
