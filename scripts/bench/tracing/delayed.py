"""A real service that takes its time over marked requests, in one place of its own; the others it serves as ever.

    python -m scripts.bench.tracing.delayed PLACE --seconds 0.5 [--step-ms 5] [--num-blocks 64]

PLACE is one of tokenizer, prefill, decode, draft, detokenizer, gateway, client.  A delay blocks the whole service, as
slow work does; only that of `client` stands for a client's, and blocks one write.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from scripts.bench.common import standin
from scripts.bench.tracing.requests import LABEL, SEED
from shared.actor import run_actor
from shared.messages import StepPlan, StepResult

Run = Callable[[argparse.Namespace], int]


def before(kind: type, name: str, seconds: float, is_marked: Callable[..., bool]) -> None:
    """Let a method take so long before it begins, where its arguments are those of a marked request."""
    method = getattr(kind, name)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        if is_marked(*args, **kwargs):
            time.sleep(seconds)
        return method(*args, **kwargs)

    setattr(kind, name, delayed)


def tokenizer(args: argparse.Namespace) -> int:
    from services.tokenizer.main import make
    from services.tokenizer.prompts import PromptRules

    before(PromptRules, "check", args.seconds, lambda _, request, **__: request.header.label == LABEL)
    return run_actor(make)


def detokenizer(args: argparse.Namespace) -> int:
    from services.detokenizer.main import make
    from services.detokenizer.stream import TextStream

    def ends(stream: TextStream, tokens: Any, *_: float) -> bool:
        return bool(stream.opened.header.label == LABEL and tokens.finish_reason)

    before(TextStream, "advance", args.seconds, ends)
    return run_actor(make)


def gateway(args: argparse.Namespace) -> int:
    from services.gateway.main import main
    from services.gateway.streams.stream import Stream

    before(Stream, "accept", args.seconds, lambda s, news: bool(s.header.label == LABEL and news.finish_reason))
    return int(main() or 0)


def client(args: argparse.Namespace) -> int:
    """A client that reads late, as its gateway sees it: the write of the last message does not return."""
    from services.gateway.grpc.servicer import InferenceServicer
    from services.gateway.main import main

    write = InferenceServicer._write

    class Late:
        def __init__(self, context: Any) -> None:
            self._context = context

        def __getattr__(self, name: str) -> Any:
            return getattr(self._context, name)

        async def write(self, response: Any) -> None:
            if response.finish_reason:
                await asyncio.sleep(args.seconds)
            await self._context.write(response)

    async def late(self: Any, service: Any, proto: Any, stream: Any, context: Any) -> None:
        await write(self, service, proto, stream, Late(context) if proto.label == LABEL else context)

    InferenceServicer._write = late  # type: ignore[method-assign]
    return int(main() or 0)


def draft(args: argparse.Namespace) -> int:
    from services.draft.main import make
    from services.draft.ngram import NGramProposer

    marked: set[int] = set()
    opened = NGramProposer.open

    def opens(self: Any, sequence: Any) -> None:
        (marked.add if sequence.seed >= SEED else marked.discard)(sequence.row)
        opened(self, sequence)

    NGramProposer.open = opens  # type: ignore[method-assign]
    before(NGramProposer, "propose", args.seconds, lambda _, goals, *__: not marked.isdisjoint(goals))
    return run_actor(make)


class SlowSteps(standin.StandIn):
    """Takes its time over one step of each marked sequence: that of its prompt, or that of a later token."""

    def __init__(self, settings: Any, step_seconds: float, *, args: argparse.Namespace) -> None:
        super().__init__(settings, step_seconds)
        self._late_position = {"prefill": 0, "decode": 4}.get(args.place, -1)
        self._seconds = args.seconds
        if args.num_blocks:
            self.capacity = msgspec.structs.replace(self.capacity, num_blocks=args.num_blocks)

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        for row, computed, scheduled in zip(
            plan.rows, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            seed, num_prompt, _ = self._rows[row]
            if seed >= SEED and computed + scheduled - num_prompt == self._late_position:
                time.sleep(self._seconds)
        return result


def worker(args: argparse.Namespace) -> int:
    standin.StandIn = partial(SlowSteps, args=args)  # type: ignore[misc, assignment]
    return int(run_actor(lambda transport, settings: standin.make(transport, settings, args.step_ms / 1000)))


PLACES: dict[str, Run] = {
    "tokenizer": tokenizer, "prefill": worker, "decode": worker, "draft": draft, "detokenizer": detokenizer,
    "gateway": gateway, "client": client, "none": worker,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=PLACES)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--num-blocks", type=int, default=0)
    args = parser.parse_args()
    return PLACES[args.place](args)


if __name__ == "__main__":
    sys.exit(main())
