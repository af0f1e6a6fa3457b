"""Chats rendered out of process, by a pool of children that know the model's templates."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from services.tokenizer.call_ids import ids_of, with_ids
from services.tokenizer.chats import render_job
from services.tokenizer.confined.children import ChildPool
from services.tokenizer.confined.frames import MOST_ESCAPED, Rendering, RenderJob, RenderSetup
from shared.errors import RequestError
from shared.messages import ChatMessage, ChatOptions

NUM_RENDERERS = 2
MAX_MEMORY = 512 << 20


class RendererPool(ChildPool[Rendering]):
    """Renders chats; one costs at most `timeout` seconds of one child."""

    module = "services.tokenizer.confined.renderer"
    field, action = "chat", "render"
    least_seconds = 0.05  # many times what a template takes, so a child that had less was kept waiting

    def __init__(
        self,
        template: str,
        special_tokens: dict[str, str],
        *,
        timeout: float,
        max_output_bytes: int,
        num_renderers: int = NUM_RENDERERS,
        tool_template: str | None = None,
    ) -> None:
        super().__init__(
            RenderSetup(
                template=template,
                tool_template=tool_template or template,
                special_tokens=special_tokens,
                max_output_bytes=max_output_bytes,
                max_memory=MAX_MEMORY + 4 * max_output_bytes,
                max_cpu_seconds=math.ceil(timeout) + 1,
            ),
            RenderJob([]),
            Rendering,
            timeout=timeout,
            max_answer_bytes=MOST_ESCAPED * max_output_bytes + 4096,
            num_children=num_renderers,
        )
        self._make_id = ids_of(template + (tool_template or ""))

    async def render(
        self,
        messages: Sequence[ChatMessage],
        options: ChatOptions | None = None,
        now: float | None = None,
        allowance: float = 1.0,
    ) -> str:
        """The chat as the model's prompt.  Raises RequestError where the template does not give one in time.

        `allowance`: times the usual that it may wait and take.
        """
        if self._make_id is not None:
            messages = with_ids(messages, self._make_id)
        job = render_job(messages, options, time.time() if now is None else now)
        rendering = await self.ask(job, allowance)
        if rendering.error:
            raise RequestError(rendering.error, field="chat")
        return rendering.text + (options.opening if options else "")
