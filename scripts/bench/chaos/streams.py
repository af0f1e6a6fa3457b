"""The clients: streams that are asked for again and again, their output, and when each received something."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import msgspec

from protos.pageant.v1 import inference_pb2_grpc
from scripts.bench.chaos.cases import Case
from scripts.bench.chaos.faults import Inflicted

TIMEOUT = 300.0  # seconds, of one stream
FELT = 0.8  # seconds after which a fault is felt by the streams that it concerns
FLOWING = 0.75  # a stream that received something within so many seconds flows
GIVEN_UP = 60.0


class StreamOutput(msgspec.Struct):
    """All of one sequence that must not depend on what happened meanwhile."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[bytes] = []
    prompt_logprobs: list[bytes] = []
    finish_reason: int = 0
    stop_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafts: tuple[int, int] = (0, 0)  # tokens drafted and accepted: chance, so it is not compared

    def add(self, message: Any) -> None:
        self.text += message.text
        self.token_ids += message.token_ids
        self.logprobs += [entry.SerializeToString(deterministic=True) for entry in message.logprobs]
        self.prompt_logprobs += [entry.SerializeToString(deterministic=True) for entry in message.prompt_logprobs]
        if message.finish_reason:
            self.finish_reason, self.stop_reason = message.finish_reason, message.stop_reason
            self.prompt_tokens = message.usage.prompt_tokens
            self.completion_tokens = message.usage.completion_tokens
            self.drafts = (message.usage.num_draft_tokens, message.usage.num_accepted_tokens)


class ReceiptTimes:
    """When one client received something, from the opening of its first stream on."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def note(self) -> None:
        self.times.append(time.monotonic())

    def longest_pause(self, since: float, until: float) -> float:
        """The longest time without a message that overlaps [since, until]."""
        times = [t for t in self.times if t >= since]
        before = max((t for t in self.times if t < since), default=since)
        within = [before, *(t for t in times if t <= until), *[t for t in times if t > until][:1]]
        return max((b - a for a, b in itertools.pairwise(within)), default=0.0)


async def generate(channel: Any, case: Case, arrivals: ReceiptTimes) -> list[StreamOutput]:
    """One stream, to its end.  Raises grpc.RpcError where it fails."""
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    outputs = [StreamOutput() for _ in range(max(1, case.request.sampling.n))]
    arrivals.note()
    async for message in stub.Generate(case.request, timeout=TIMEOUT):
        arrivals.note()
        outputs[message.index].add(message)
    return outputs


class Repetition:
    """One client: asks for its case until it is told to stop, and compares every answer with the undisturbed one."""

    def __init__(self, case: Case, wanted: list[StreamOutput]) -> None:
        self.case = case
        self.wanted = wanted
        self.arrivals = ReceiptTimes()
        self.num_streams = self.num_drafted = self.num_accepted = 0
        self.wrong: list[str] = []

    async def run(self, channel: Any, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                got = await generate(channel, self.case, self.arrivals)
            except grpc.aio.AioRpcError as error:
                self.wrong.append(f"{self.case.kind}: {error.code().name}: {error.details()}")
                await asyncio.sleep(0.1)
            else:
                self.wrong += differences(self.case.kind, got, self.wanted)
                self.num_drafted += sum(output.drafts[0] for output in got)
                self.num_accepted += sum(output.drafts[1] for output in got)
            self.num_streams += 1


def differences(kind: str, got: list[StreamOutput], wanted: list[StreamOutput]) -> list[str]:
    """What differs, in words: sequence, field and both values where they part."""
    found = []
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        for field in (field for field in StreamOutput.__struct_fields__ if field != "drafts"):
            mine, theirs = getattr(one, field), getattr(other, field)
            if mine != theirs:
                found.append(f"{kind}, sequence {index}: {field} differs{_where(mine, theirs)}")
    return found


def _where(mine: Any, theirs: Any) -> str:
    if not isinstance(mine, (str, list)):
        return f": {mine!r}, undisturbed {theirs!r}"
    same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    return f" from {same} on: {mine[same : same + 8]!r}, undisturbed {theirs[same : same + 8]!r}"


async def disturbed_orphans(connect: Callable[[], Any], case: Case, stop: asyncio.Event) -> None:
    """A client of a gateway that is itself a victim: what it gets does not matter, what it leaves behind does."""
    while not stop.is_set():
        try:
            async with connect() as channel:
                await generate(channel, case, ReceiptTimes())
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.1)


async def until_flowing(clients: Sequence[ReceiptTimes]) -> None:
    """Return once every stream flows again, or after a minute: then the outputs tell what is wrong."""
    deadline = time.monotonic() + GIVEN_UP
    await asyncio.sleep(FELT)
    while time.monotonic() < deadline:
        now = time.monotonic()
        if all(client.times and now - client.times[-1] < FLOWING for client in clients):
            return
        await asyncio.sleep(0.05)


def pauses(inflicted: Sequence[Inflicted], clients: Sequence[ReceiptTimes], end: float) -> list[float]:
    """Per fault, the longest pause of any stream until the next fault."""
    ends = [following.begun for following in inflicted[1:]] + [end]
    return [
        max((client.longest_pause(one.begun, until) for client in clients), default=0.0)
        for one, until in zip(inflicted, ends, strict=True)
    ]
