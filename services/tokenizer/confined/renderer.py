"""One child that renders chats: python -m services.tokenizer.confined.renderer"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache

from jinja2 import TemplateError

from services.tokenizer.confined.confinement import serve
from services.tokenizer.confined.frames import Rendering, RenderJob, RenderSetup
from services.tokenizer.confined.template import OutputTooLargeError, compile_template, render

MAX_REASON = 300  # characters of a template's own words


def prepare(setup: RenderSetup) -> Callable[[RenderJob], Rendering]:
    """The first chat compiles the model's template: where that fails, that chat is refused."""
    _import_all()
    compiled = cache(compile_template)

    def answer(job: RenderJob) -> Rendering:
        if not job.messages:  # it only asks whether this process is up
            return Rendering()
        try:
            template = compiled(setup.tool_template if job.tools else setup.template)
            return Rendering(render(template, setup.special_tokens, job, setup.max_output_bytes))
        except Exception as error:
            return Rendering(error=_reason(error))

    return answer


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
    serve(RenderSetup, RenderJob, prepare)
