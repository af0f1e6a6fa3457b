"""A million frames that no service would send, at each service's inbox: none may end it, none may change its state.

    scripts/fuzz_bus [--check] [--frames 1000000] [--seed 1] [--insider] [SERVICE ...]

Each service is its own actor with its own run loop and work in hand, in this process; frames reach its inbox as they
would from the wire.  What its state is, `scripts/fuzz/stages.py` says.  A stranger's frames name no member of the
deployment; `--insider` draws from the ids, addresses and epochs that exist, as a member of the deployment gone mad
could: its frames may change what they name, so only that nothing dies and that the scheduler's invariants hold is asked
of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog
import uvloop

from scripts.bench.common.report import Result, bench_parser, finish
from scripts.fuzz.frames import FrameFuzzer
from scripts.fuzz.stages import STAGES, GatewayStage, SchedulerStage, Stage
from services.scheduler.invariants import check
from shared.messages import Message, Refused, encode

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
    seconds: float = 0.0

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
        start = time.monotonic()
        await _play(stage, running, itertools.islice(frames, num_frames), outcome, insider=insider)
        outcome.seconds = time.monotonic() - start
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
        while stage.actor.progress < goal:  # noqa: ASYNC110  # nothing tells of a message that was handled
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
    stage.network.close()


def lines_of(outcome: FuzzOutcome) -> list[Result]:
    name, count = outcome.service, outcome.num_frames
    what = f"{outcome.num_undecodable:,} undecodable, {outcome.num_dropped:,} dropped, {outcome.num_handled:,} handled"
    note = f"{what}; {1e6 * outcome.seconds / max(1, count):.0f} us each"
    return [
        Result(f"{name}: frames", count, note=note),
        Result(f"{name}: deaths", int(bool(outcome.crash)), at_most=0, note=outcome.crash[:300]),
        Result(f"{name}: state changes", outcome.num_changes, at_most=0, note=outcome.change[:300]),
    ]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("services", nargs="*", metavar="SERVICE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--frames", type=int, default=1_000_000, help="at each inbox")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--insider", action="store_true", help="frames that name members and requests that exist")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    lines: list[Result] = []
    for service in args.services or STAGES:
        outcome = uvloop.run(fuzz(service, args.frames, args.seed, insider=args.insider))
        lines += lines_of(outcome)
        print(f"{service}: {outcome.num_frames:,} frames in {outcome.seconds:.0f} s", flush=True)
    sender = "an insider" if args.insider else "a stranger"
    return finish(lines, check=args.check, title=f"frames of {sender}, seed {args.seed}")
