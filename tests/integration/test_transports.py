"""The whole troupe in one event loop: over memory and over sockets it says the same, message for message."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.loading.load import load_runner
from services.detokenizer.main import make as make_detokenizer
from services.scheduler.main import make as make_scheduler
from services.tokenizer.main import make as make_tokenizer
from services.worker.actor import WorkerActor
from services.worker.plans.steps import InlineSteps
from shared.actor import Actor, MemberActor
from shared.actor.actor import Handlers
from shared.config import Settings
from shared.errors import RejectCode
from shared.messages import (
    AbortRequest,
    AdapterLoaded,
    ChatMessage,
    DecodeResult,
    DescribeResult,
    EncodeResult,
    FinishReason,
    GatewayInbox,
    Load,
    PiecesResult,
    Refused,
    RequestHeader,
    RequestRejected,
    Roster,
    ServiceName,
    TextBatch,
    Tick,
    TokenizeRequest,
)
from shared.requests.sampling import SamplingParams
from shared.transport import MemoryTransport, Transport, make_transport
from tests.integration.engine import SETTINGS

SILENCE = 5.0  # seconds


class Front(MemberActor):
    """A gateway without gRPC: asks, and keeps what comes back."""

    service = ServiceName.GATEWAY
    inbox_union = GatewayInbox

    def __init__(self, transport: Transport, settings: Settings) -> None:
        super().__init__(transport, settings)
        self.asked: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, str] = {}
        self.ends: dict[str, FinishReason | RequestRejected] = {}
        self.refused: list[str] = []
        self.changed = asyncio.Event()

    def handlers(self) -> Handlers:
        ignored: Handlers = dict.fromkeys(
            (EncodeResult, DecodeResult, PiecesResult, DescribeResult, Load, AdapterLoaded), lambda _: None
        )
        return {
            **ignored,
            TextBatch: self.handle_text,
            RequestRejected: self.handle_rejected,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    def handle_text(self, batch: TextBatch) -> None:
        for piece in batch.sequences:
            text = self.texts.setdefault(piece.request_id, "")
            assert piece.text_offset == len(text), "no text is lost or repeated"
            self.texts[piece.request_id] = text + piece.text
            if piece.finish_reason is not None:
                self.ends[piece.request_id] = piece.finish_reason
        self.changed.set()

    def handle_rejected(self, rejection: RequestRejected) -> None:
        """As a gateway does it waits where a service is missing: a tokenizer may hear of the scheduler after us."""
        if rejection.code is RejectCode.UNAVAILABLE:
            self.refused.append(rejection.request_id)
        else:
            self.ends[rejection.request_id] = rejection
        self.changed.set()

    def before_flush(self) -> None:
        self.changed.set()

    def on_tick(self) -> None:
        refused, self.refused = self.refused, []
        for name in refused:
            self.ask(name, **self.asked[name])

    async def until(self, condition: Any) -> None:
        """As a gateway does it asks again for what was silent for seconds: a connection over TCP may break."""
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()  # a roster comes twice a second
                if clock() - asked_at > SILENCE:
                    asked_at = clock()
                    for name in self.asked.keys() - self.texts.keys() - self.ends.keys():
                        self.ask(name, **self.asked[name])

    def ask(self, name: str, **request: Any) -> None:
        self.asked[name] = request
        (tokenizer,) = self.members(ServiceName.TOKENIZER)
        header = RequestHeader(name, self.inbox.address, trace_id="t" * 32)
        self.send(tokenizer.address, TokenizeRequest(header, **request))
        self.outbox.flush()

    def abort(self, name: str) -> None:
        (tokenizer,) = self.members(ServiceName.TOKENIZER)
        self.send(tokenizer.address, AbortRequest(name))
        self.outbox.flush()


def cast(transport: Transport, settings: Settings) -> tuple[Front, list[Actor]]:
    worker = WorkerActor(transport, settings, lambda: load_runner(settings), InlineSteps)
    front = Front(transport, settings)
    others = [make_scheduler(transport, settings), make_tokenizer(transport, settings)]
    return front, [*others, make_detokenizer(transport, settings), worker, front]


async def play(transport: Transport, settings: Settings) -> tuple[dict[str, str], dict[str, Any]]:
    """One performance: requests of each kind, an abort, a refusal, and all actors leave."""
    front, actors = cast(transport, settings)
    async with asyncio.TaskGroup() as group:
        for actor in actors:
            group.create_task(actor.run())
        await front.until(lambda: len(front.roster.members) == 4)
        params = SamplingParams(max_tokens=25, seed=3, temperature=0.9)
        for index in range(5):
            front.ask(f"text{index}", params=msgspec.structs.replace(params, seed=index), text="Once upon a time")
        front.ask("chat", params=params, chat=[ChatMessage("user", "Tell me a story about a cat.")])
        front.ask("stop", params=msgspec.structs.replace(params, stop=["a"], max_tokens=60), text="One day")
        front.ask("bad", params=msgspec.structs.replace(params, top_p=7.0), text="One day")
        front.ask("gone", params=msgspec.structs.replace(params, max_tokens=900), text="One day")
        await front.until(lambda: "gone" in front.texts)
        front.abort("gone")
        await front.until(lambda: len(front.ends) == 8)
        for actor in (front, *actors):
            actor.request_drain()
    front.texts.pop("gone")
    return front.texts, front.ends


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_in_process_equals_sockets(tmp_path: Path, kind: str) -> None:
    settings = SETTINGS.replace(
        runtime_dir=str(tmp_path / "run"), transport=kind, scheduler_port=0, advertise_host="127.0.0.1"
    )
    texts, ends = await play(MemoryTransport(), settings)
    assert isinstance(ends["bad"], RequestRejected)
    assert ends["bad"].field == "top_p"
    assert "a" not in texts["stop"]
    assert ends["stop"] is FinishReason.STOP
    assert len({texts[f"text{index}"] for index in range(5)}) > 1
    if kind == "tcp":
        settings = settings.replace(scheduler_port=free_port())
    transport = make_transport(settings.deployment)
    assert await play(transport, settings) == (texts, ends)
    transport.close()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
