"""The chat template in its sandbox: what a template can see and do.

Templates come with the checkpoint, so they are not to be trusted.  The environment is jinja2's immutable sandbox,
with the globals, filters and tags that templates of the field rely on.  Only the renderer process imports this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.tokenizer.confined.frames import RenderJob

MARK = "pageant7c1e5b92open"  # behind the words of a message that stays open, while it is rendered


class GenerationTag(Extension):
    """{% generation %} marks what an assistant has said, for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class OutputTooLargeError(Exception):
    """A template wrote more than it may."""


def compile_template(source: str) -> Template:
    """Raises jinja2.TemplateError where the source is no template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def render(template: Template, special_tokens: Mapping[str, str], job: RenderJob, max_output_bytes: int) -> str:
    """The text of a chat, which asks for the assistant's next message or leaves the last one open."""
    messages = [*job.messages[:-1], _marked(job.messages[-1])] if job.continue_final_message else job.messages
    given = {
        "strftime_now": datetime.fromtimestamp(job.now).strftime,
        **special_tokens,
        **job.variables,
        "messages": messages,
        "tools": job.tools,
        "documents": None,
        "add_generation_prompt": job.add_generation_prompt,
    }
    text = "".join(_capped(template.generate(given), max_output_bytes))
    return _left_open(text, job.messages[-1]) if job.continue_final_message else text


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a mark behind its words: they alone may be anywhere, also in what the template writes."""
    words, space = _content(message)
    return {**message, "content": words + MARK + space}


def _left_open(text: str, message: Mapping[str, Any]) -> str:
    """Without what the template writes after the last message; white space at its end is what the template left."""
    words, space = _content(message)
    before, mark, after = text.rpartition(MARK)
    if not (words and mark):
        raise TemplateError("the last message cannot be continued: its content is not found in the rendered chat")
    kept = 0
    while kept < len(space) and after[kept : kept + 1] == space[kept]:
        kept += 1
    return before + space[:kept]


def _content(message: Mapping[str, Any]) -> tuple[str, str]:
    """A message's words, and the white space behind them."""
    content = str(message.get("content", ""))
    words = content.rstrip()
    return words, content[len(words) :]


def _capped(pieces: Iterator[str], max_output_bytes: int) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece.encode("utf-8", "surrogatepass"))
        if size > max_output_bytes:
            raise OutputTooLargeError
        yield piece


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which a model has never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
