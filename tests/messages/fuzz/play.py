"""Frames that no service would send, at a service's inbox: none may end it, none may change its state.

Each service is its own actor with its own run loop and work in hand, in this process; frames reach its inbox as they
would from the wire.  What its state is, `tests/messages/fuzz/stages.py` says.  A stranger's frames name no member of
the deployment.  An insider's are drawn from the ids, addresses and epochs that exist, as a member of the deployment
gone mad could: its frames may change what they name, so only that nothing dies and that the scheduler's invariants hold
is asked of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.scheduler.invariants import check
from shared.messages import Message, Refused, encode
from tests.messages.fuzz.frames import FrameFuzzer
from tests.messages.fuzz.stages import STAGES, GatewayStage, SchedulerStage, Stage

BATCH = 256
TURNS = 8  # of the event loop, in which a batch and what it set off come to rest


@dataclass
class FuzzOutcome:
    """What became of the frames at one inbox."""

    service: str
    num_frames: int = 0
    num_undecodable: int = 0
    num_dropped: int = 0
    num_changes: int = 0
    crash: str = ""
    change: str = ""

    @property
    def num_handled(self) -> int:
        return self.num_frames - self.num_undecodable - self.num_dropped


async def fuzz(service: str, num_frames: int, seed: int, *, insider: bool = False) -> FuzzOutcome:
    """So many frames at one service's inbox."""
    stage, outcome = STAGES[service](), FuzzOutcome(service)
    running = asyncio.create_task(stage.actor.run())
    try:
        await begin(stage)
        frames = FrameFuzzer(stage.actor.inbox_union, seed, stage.known if insider else ())
        await _play(stage, running, itertools.islice(frames, num_frames), outcome, insider=insider)
        outcome.num_undecodable = stage.actor.inbox.num_undecodable
        outcome.num_dropped = stage.actor.num_dropped
    finally:
        await _end(stage, running, outcome)
    return outcome


async def begin(stage: Stage) -> None:
    """Have the actor's work in hand."""
    await _say(stage, stage.prepare())
    if isinstance(stage, GatewayStage):
        await _say(stage, stage.begin())


async def _say(stage: Stage, messages: Sequence[Message]) -> None:
    """Return once they are handled, whatever had to be loaded before."""
    goal = stage.actor.progress + len(messages)
    stage.actor.inbox.deliver([encode(message) for message in messages])
    async with asyncio.timeout(30):
        while stage.actor.progress < goal:  # nothing tells of a message that was handled
            await asyncio.sleep(0.01)


async def _rest() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def _play(
    stage: Stage, running: asyncio.Task[None], frames: Iterable[bytes], outcome: FuzzOutcome, *, insider: bool
) -> None:
    before = stage.digest()
    dismissal = Refused.__name__.encode(), stage.actor.instance.encode()
    for batch in iter(lambda: list(itertools.islice(frames, BATCH)), []):
        if insider:  # a sender that knows a member's name may tell it to leave, as its scheduler would
            batch = [frame for frame in batch if not all(word in frame for word in dismissal)]
        outcome.num_frames += len(batch)
        stage.actor.inbox.deliver(batch)
        await _rest()
        if running.done():
            return
        if insider:
            if isinstance(stage, SchedulerStage):
                check(stage.actor.core)
            continue
        stage.settle()
        if (after := stage.digest()) != before:
            outcome.num_changes += 1
            outcome.change = outcome.change or f"{before} became {after}"
            before = after


async def _end(stage: Stage, running: asyncio.Task[None], outcome: FuzzOutcome) -> None:
    if not running.done():
        running.cancel()
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    if isinstance(ended, BaseExceptionGroup):
        outcome.crash = repr(ended.exceptions[0])
    elif isinstance(ended, Exception):
        outcome.crash = repr(ended)
    await stage.close()
