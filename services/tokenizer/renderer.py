"""One renderer child: python -m services.tokenizer.renderer

Reads a setup and then jobs from standard input, and answers each on standard output.  It is confined before it sees
a template: bounded memory, no files, no children, and it dies with its parent.  What it does too long, the parent ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec
from jinja2 import Template, TemplateError

from services.tokenizer.frames import PREFIX, Rendering, RenderJob, RenderSetup, to_frame
from services.tokenizer.template import OutputTooLargeError, compile_template, render

PR_SET_PDEATHSIG = 1
MAX_REASON = 300  # characters of a template's own words


def main() -> None:
    """Serve until the parent closes the pipe."""
    parent = os.getppid()
    _die_with_parent(parent)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    frame = _read(requests)
    if frame is None:
        return
    setup = msgspec.msgpack.decode(frame, type=RenderSetup)
    _import_all()
    _confine(setup.max_memory)
    jobs = msgspec.msgpack.Decoder(RenderJob)
    answer = Answerer(setup)
    while (frame := _read(requests)) is not None:
        _limit_cpu(setup.max_cpu_seconds)
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


def _read(stream: BinaryIO) -> bytes | None:
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    return stream.read(PREFIX.unpack(prefix)[0])


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(0)


def _import_all() -> None:
    """Have everything read that jinja2 and the clock read late: once confined, no file can be opened."""
    job = RenderJob([{"role": "user", "content": "x"}])
    for source in ("{{ messages[0].content | tojson }}{{ strftime_now('%Y') }}", "{{ raise_exception('x') }}", "{% if"):
        with contextlib.suppress(TemplateError):
            render(compile_template(source), {}, job, 16)


def _confine(max_memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _limit_cpu(seconds: int) -> None:
    """Allow so much from now on: it ends a child that spins while its parent is stopped."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))


if __name__ == "__main__":
    main()
