"""A small pool of renderer children: each renders one chat at a time, and is killed where that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from services.tokenizer.chats import render_job
from services.tokenizer.frames import PREFIX, Rendering, RenderJob, RenderSetup, to_frame
from shared.errors import FatalError, RejectCode, RequestError
from shared.messages import ChatMessage, ChatOptions

log = structlog.get_logger()

NUM_RENDERERS = 2
MAX_MEMORY = 512 << 20
START_TIMEOUT = 30.0  # seconds for a child to come up, on a busy machine
RESTART_PAUSE = 1.0  # seconds before another try
ROOT = Path(__file__).parents[2]

_rendering = msgspec.msgpack.Decoder(Rendering)


class RendererPool:
    """Renders chats out of process.

    Invariant: a child in `_idle` has no work under way.  A child whose answer did not come in time, or made no sense,
    is killed and another takes its place; so one chat costs at most `timeout` of one child.
    """

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
        self.timeout = timeout
        self.num_killed = 0
        self._max_output_bytes = max_output_bytes
        self._num_renderers = num_renderers
        self._setup = to_frame(
            RenderSetup(
                template=template,
                tool_template=tool_template or template,
                special_tokens=special_tokens,
                max_output_bytes=max_output_bytes,
                max_memory=MAX_MEMORY + 4 * max_output_bytes,
                max_cpu_seconds=math.ceil(timeout) + 1,
            )
        )
        self._idle: asyncio.Queue[Process] = asyncio.Queue()
        self._children: set[Process] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._all_reaped = asyncio.Event()
        self._closed = False

    async def start(self) -> None:
        """Start all children, and wait until each is ready.  Raises FatalError where one does not come up."""
        await asyncio.gather(*(self._add_child() for _ in range(self._num_renderers)))

    async def close(self) -> None:
        """Kill all children.  A chat that is being rendered is refused, and its renderer reaped by who waits for it."""
        self._closed = True
        for child in self._children:
            _end(child)
        await asyncio.gather(*self._replacing)
        while not self._idle.empty():
            await self._reap(self._idle.get_nowait())
        if self._children:
            await self._all_reaped.wait()

    async def render(
        self, messages: Sequence[ChatMessage], options: ChatOptions | None = None, now: float | None = None
    ) -> str:
        """The chat as the model's prompt.  Raises RequestError where the template does not give one in time."""
        job = render_job(messages, options, time.time() if now is None else now)
        try:
            async with asyncio.timeout(self.timeout):
                child = await self._idle.get()
        except TimeoutError:
            raise RequestError(
                f"no chat template renderer became free within {self.timeout} s",
                code=RejectCode.UNAVAILABLE,
                retry_after_ms=int(1000 * self.timeout),
            ) from None
        rendering = None
        try:
            rendering = await self._ask(child, job, self.timeout)
        finally:
            if rendering is not None:
                self._idle.put_nowait(child)
            else:
                self._replace(child)
        if rendering.error:
            raise _refusal(rendering.error)
        return rendering.text + (options.opening if options else "")

    async def _ask(self, child: Process, job: RenderJob, seconds: float) -> Rendering:
        try:
            async with asyncio.timeout(seconds):
                return await self._exchange(child, job)
        except TimeoutError:
            raise _refusal(f"the chat template did not finish within {seconds} s") from None
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
            raise _refusal("the chat template broke its renderer's limits") from None

    async def _exchange(self, child: Process, job: RenderJob) -> Rendering:
        assert child.stdin is not None and child.stdout is not None  # both are pipes
        child.stdin.write(to_frame(job))
        await child.stdin.drain()
        (size,) = PREFIX.unpack(await child.stdout.readexactly(PREFIX.size))
        if size > self._max_output_bytes + 4096:
            raise msgspec.DecodeError(f"an answer of {size} bytes")
        return _rendering.decode(await child.stdout.readexactly(size))

    def _replace(self, child: Process) -> None:
        self.num_killed += 1
        if not self._closed:
            log.warning("renderer_replaced", pid=child.pid)
        task = asyncio.get_running_loop().create_task(self._replace_now(child))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace_now(self, child: Process) -> None:
        await self._reap(child)
        while not self._closed:
            try:
                await self._add_child()
                return
            except FatalError as error:
                log.error("renderer_not_started", reason=str(error))
                await asyncio.sleep(RESTART_PAUSE)

    async def _add_child(self) -> None:
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "services.tokenizer.renderer"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT), "PATH": os.defpath, "LC_ALL": "C.UTF-8"},
            )
        except OSError as error:
            raise FatalError(f"no process for rendering chats: {error}") from error
        self._children.add(child)
        self._all_reaped.clear()
        assert child.stdin is not None  # a pipe
        child.stdin.write(self._setup)
        try:
            # An empty chat asks whether the child is up, so that the first real one does not pay for its imports.
            await self._ask(child, RenderJob([]), START_TIMEOUT)
        except RequestError as error:
            await self._reap(child)
            raise FatalError("a process for rendering chats does not answer") from error
        self._idle.put_nowait(child)

    async def _reap(self, child: Process) -> None:
        """Kill a child whose output nobody reads any more."""
        _end(child)
        if child.stdin is not None:
            child.stdin.close()
        # Reading to the end lets the pipe close; a plain wait would leave it open where output is unread.
        await child.communicate()
        self._children.discard(child)
        if not self._children:
            self._all_reaped.set()


def _end(child: Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()


def _refusal(message: str) -> RequestError:
    return RequestError(message, field="chat")
