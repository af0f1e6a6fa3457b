"""A tokenizer among bare inboxes, for tests of its whole flows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.tokenizer.actor import TokenizerActor
from services.tokenizer.confined.renderers import RendererPool
from shared.config import Settings
from shared.messages import (
    AddRequest,
    ChatMessage,
    GatewayInbox,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Message,
    RequestHeader,
    RequestRejected,
    Roster,
    SchedulerInbox,
    ServiceName,
    TokenizeRequest,
)
from shared.requests.sampling import SamplingParams
from shared.transport import MemoryTransport
from tests.unit.detokenizer.models import tokenizer

MODEL = Path(__file__).resolve().parents[3] / "models" / "pageant-stories"
GATEWAY = "memory://gateway"
ME = "memory://tokenizer-1"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% if a and 0 %}x{% endif %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.content == 'loop' %}"
    + LOOP
    + "{% endif %}{{ m.content }}{% endfor %}"
)


class Bench:
    """A tokenizer of the bundled vocabulary among bare inboxes."""

    def __init__(self, path: Path, template: str | None, **settings: Any) -> None:
        self.network = MemoryTransport()
        self.scheduler = self.network.bind("scheduler", SchedulerInbox)
        self.gateway = self.network.bind("gateway", GatewayInbox)
        self.model = tokenizer(path)
        self.settings = Settings.of(**{"heartbeat_interval": 0.05, "template_timeout": 0.5} | settings)
        self.pool = None
        if template is not None:
            seconds = self.settings.gateway.template_timeout
            self.pool = RendererPool(template, self.model.special_tokens, timeout=seconds, max_output_bytes=1 << 20)
        self.actor = TokenizerActor(self.network, self.settings, self.model, self.pool, "tokenizer-1")
        self.outbox = self.network.outbox()

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.outbox.send(ME, message)
        self.outbox.flush()

    def roster(self) -> None:
        me = Member(ServiceName.TOKENIZER, "tokenizer-1", ME, 1)
        self.send(Roster(1, 1, [me], max_model_len=256, max_input_length=200))

    async def next(self, inbox: Any, count: int = 1) -> list[Any]:
        """The next messages in an inbox, however long they take."""
        found: list[Any] = []
        async with asyncio.timeout(30):
            while len(found) < count:
                found += [m for m in await inbox.recv_batch() if not isinstance(m, Hello | Heartbeat | Goodbye)]
        return found

    async def added(self) -> AddRequest:
        (message,) = await self.next(self.scheduler)
        assert isinstance(message, AddRequest)
        return message

    async def rejected(self, *messages: Message) -> RequestRejected:
        self.send(*messages)
        (message,) = await self.next(self.gateway)
        assert isinstance(message, RequestRejected)
        return message


@asynccontextmanager
async def bench(template: str | None = None, *, live: bool = True, **settings: Any) -> AsyncIterator[Bench]:
    made = Bench(MODEL, template, **settings)
    if template is not None:
        made.model.chat_template = template
    task = asyncio.create_task(made.actor.run())
    try:
        if live:
            made.roster()
        yield made
    finally:
        made.model.chat_template = None
        made.actor.request_drain()
        async with asyncio.timeout(30):
            await task


def header(request_id: str = "r", **fields: Any) -> RequestHeader:
    return RequestHeader(request_id, GATEWAY, **fields)


def text(prompt: str | None, request_id: str = "r", **params: Any) -> TokenizeRequest:
    return TokenizeRequest(header(request_id), SamplingParams(**params), text=prompt)


def chat(*contents: str, request_id: str = "r", **params: Any) -> TokenizeRequest:
    messages = [ChatMessage("user", content) for content in contents]
    return TokenizeRequest(header(request_id), SamplingParams(**params), chat=messages)
