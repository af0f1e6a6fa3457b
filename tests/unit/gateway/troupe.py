"""The other side of the gateway's messages, scripted: two tokenizers, a scheduler and a detokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import msgspec

from protos.pageant.v1 import control_pb2_grpc, inference_pb2_grpc
from services.gateway.actor import GatewayActor
from shared.config import Settings, load_settings
from shared.messages import (
    DescribeRequest,
    DescribeResult,
    Fingerprint,
    FinishReason,
    Member,
    Message,
    Roster,
    SchedulerInbox,
    SequenceText,
    ServiceName,
    TextBatch,
    TokenizeRequest,
    TokenizerInbox,
    WorkerCapacity,
)
from shared.transport import Inbox, MemoryTransport

M = TypeVar("M", bound=Message)
CAPACITY = WorkerCapacity(64, 16, 8, 512, 1000, "tiny", "float32", "cpu")


def without_latency(request: TokenizeRequest) -> TokenizeRequest:
    """What is asked, whenever it is asked."""
    return msgspec.structs.replace(request, latency=None)


class FakeTroupe:
    """Answers nothing by itself: a test reads what the gateway sent and says what comes back."""

    def __init__(self, settings: Settings) -> None:
        self.network = MemoryTransport()
        self.scheduler = self.network.bind("scheduler", SchedulerInbox)
        self.tokenizers = {name: self.network.bind(name, TokenizerInbox) for name in ("tokenizer-a", "tokenizer-b")}
        self.gateway = GatewayActor(self.network, settings, "gateway-test")
        self.epoch = 1
        self.version = 0
        self.seen: dict[str, list[Any]] = {}
        self.fingerprints: list[Fingerprint] = []
        self.tags = {"<think>": 1001, "</think>": 1002}

    def members(self) -> list[Member]:
        tokenizers = [Member(ServiceName.TOKENIZER, name, f"memory://{name}", 1) for name in self.tokenizers]
        return [
            *tokenizers,
            Member(ServiceName.WORKER, "worker-a", "memory://worker-a", 1),
            Member(ServiceName.DETOKENIZER, "detokenizer-a", "memory://detokenizer-a", 1),
            Member(ServiceName.GATEWAY, "gateway-test", self.gateway.inbox.address, self.gateway.epoch),
        ]

    def announce(self, *without: str) -> None:
        """Send the gateway a roster, but for the instances or services named."""
        self.version += 1
        members = [m for m in self.members() if m.instance not in without and m.service not in without]
        self.tell(Roster(self.epoch, self.version, members, CAPACITY, 512, 500, "", self.fingerprints))

    def tell(self, message: Any) -> None:
        self.gateway.inbox.post(message)

    def say(self, request: TokenizeRequest, text: str, *, at: tuple[int, int] = (0, 0), **more: Any) -> None:
        """One token for each word of `text`, at (token, character)."""
        words = text.split()
        values: dict[str, Any] = {"index": 0, "token_ids": list(range(len(words)))} | more
        news = SequenceText(request.header.request_id, token_offset=at[0], text_offset=at[1], text=text, **values)
        self.tell(TextBatch([news]))

    async def get(self, inbox: Inbox[Any], kind: type[M]) -> M:
        """The next message of a kind; others are put aside."""
        waiting = self.seen.setdefault(inbox.address, [])
        async with asyncio.timeout(30):
            while True:
                for message in waiting:
                    if isinstance(message, kind):
                        waiting.remove(message)
                        return message
                waiting += [message for message in await inbox.recv_batch() if not self.tells_ids(message)]

    def tells_ids(self, message: Any) -> bool:
        """Answers what gateways ask for themselves: the ids of the tags of reasoning."""
        if not isinstance(message, DescribeRequest) or not message.texts:
            return False
        ids = [[self.tags.get(text, ord(text[0]))] if text else [] for text in message.texts]
        self.tell(DescribeResult(message.request_id, "{}", ids))
        return True

    async def asked(self, kind: type[M]) -> tuple[str, M]:
        """The next message of a kind at either tokenizer, and which one got it."""
        tasks = {asyncio.create_task(self.get(inbox, kind)): name for name, inbox in self.tokenizers.items()}
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.wait(tasks)
        first = done.pop()
        for task, name in tasks.items():  # the other may have got one too: it is for the next to ask
            if task is not first and not task.cancelled():
                self.seen[self.tokenizers[name].address].insert(0, task.result())
        return tasks[first], first.result()

    async def request(self) -> TokenizeRequest:
        return (await self.asked(TokenizeRequest))[1]

    async def sent(self, request: TokenizeRequest) -> None:
        """Return once all that was said of a request is on its way to the client: what follows is a message of its
        own."""
        await until(lambda: not self.gateway.inbox._mail)
        stream = self.gateway.generation.journal.get(request.header.request_id)
        assert stream is not None
        await until(lambda: not stream.num_unread)


class Front:
    """A client of the running gateway."""

    def __init__(self, troupe: FakeTroupe, channel: Any) -> None:
        self.troupe = troupe
        self.channel = channel
        self.inference: Any = inference_pb2_grpc.InferenceStub(channel)
        self.control: Any = control_pb2_grpc.ControlStub(channel)


@contextlib.asynccontextmanager
async def front(**overrides: Any) -> AsyncIterator[Front]:
    """A gateway with its server on a loopback port, a complete roster, and a client."""
    patient = {"heartbeat_interval": 0.05, "heartbeat_timeout": 60.0}  # the scheduler speaks only when a test lets it
    settings = load_settings({"model": "tiny", "port": 0, "http_port": -1} | patient | overrides, environ={})
    troupe = FakeTroupe(settings)
    running = asyncio.create_task(troupe.gateway.run())
    troupe.announce()
    await until(lambda: troupe.gateway.server.port != 0 and not troupe.gateway.readiness.missing)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{troupe.gateway.server.port}") as channel:
        yield Front(troupe, channel)
    if not running.done():
        troupe.gateway.request_drain(0.001)
    async with asyncio.timeout(5):
        await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def failure(call: Any) -> Any:
    """The status that a call ends with."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")


LAST: dict[str, Any] = {
    "finish_reason": FinishReason.STOP, "stop_reason": "2", "num_prompt_tokens": 3, "num_cached_tokens": 1,
}  # fmt: skip
