"""One renderer child: python -m services.tokenizer.renderer

Reads a setup and then jobs from standard input, and answers each on standard output.  It is confined before it sees
a template (`services.tokenizer.confinement`).
"""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec
from jinja2 import Template, TemplateError

from services.tokenizer.confinement import confine, die_with_parent, limit_cpu, read_frame
from services.tokenizer.frames import Rendering, RenderJob, RenderSetup, to_frame
from services.tokenizer.template import OutputTooLargeError, compile_template, render

MAX_REASON = 300  # characters of a template's own words


def main() -> None:
    """Serve until the parent closes the pipe."""
    parent = os.getppid()
    die_with_parent(parent)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    frame = read_frame(requests)
    if frame is None:
        return
    setup = msgspec.msgpack.decode(frame, type=RenderSetup)
    _import_all()
    confine(setup.max_memory)
    jobs = msgspec.msgpack.Decoder(RenderJob)
    answer = Answerer(setup)
    while (frame := read_frame(requests)) is not None:
        limit_cpu(setup.max_cpu_seconds)
        answers.write(to_frame(answer.answer(jobs.decode(frame))))
        answers.flush()


class Answerer:
    """Renders with the model's templates.  The first chat compiles: where that goes wrong, it is that chat's end."""

    def __init__(self, setup: RenderSetup) -> None:
        self._setup = setup
        self._compiled: dict[str, Template] = {}

    def answer(self, job: RenderJob) -> Rendering:
        """An empty job only asks whether this process is up."""
        setup = self._setup
        if not job.messages:
            return Rendering()
        try:
            template = self._template(setup.tool_template if job.tools else setup.template)
            return Rendering(render(template, setup.special_tokens, job, setup.max_output_bytes))
        except Exception as error:
            return Rendering(error=_reason(error))

    def _template(self, source: str) -> Template:
        if source not in self._compiled:
            self._compiled[source] = compile_template(source)
        return self._compiled[source]


def _reason(error: Exception) -> str:
    match error:
        case OutputTooLargeError():
            return "the rendered chat is too long"
        case MemoryError():
            return "rendering the chat takes too much memory"
        case RecursionError():
            return "the chat template recurses too deeply"
        case TemplateError():
            return f"the chat template does not accept these messages: {str(error)[:MAX_REASON]}"
        case _:
            return f"the chat template fails on these messages: {type(error).__name__}"


def _import_all() -> None:
    """Have everything read that jinja2 and the clock read late: once confined, no file can be opened."""
    job = RenderJob([{"role": "user", "content": "x"}])
    for source in ("{{ messages[0].content | tojson }}{{ strftime_now('%Y') }}", "{{ raise_exception('x') }}", "{% if"):
        with contextlib.suppress(TemplateError):
            render(compile_template(source), {}, job, 16)


if __name__ == "__main__":
    main()
