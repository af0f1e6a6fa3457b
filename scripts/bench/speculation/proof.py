"""One pair of models served in several ways, each held against the tokens that it gives without drafts."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.speculation.contest import say
from scripts.bench.speculation.deployment import Counts, Played, Request, SpeculatingDeployment, TimedAnswer
from scripts.bench.speculation.prompts import Prompts
from scripts.bench.speculation.verdict import ModeVerdict

NUM_DRAFT_TOKENS = 4
BLOCK_SIZE = 16
SMALL_POOL = 1.25  # times the longest sequence
JOIN_SECONDS = 60
SMALL, KILLED = "small pool", "draft killed"


@dataclass(frozen=True)
class Variant:
    """A way to serve.  `expects_drafts`: whether the choice of their number is not left to measurement."""

    name: str
    settings: dict[str, Any]
    expects_drafts: bool = True


class Proof:
    """A pair and its prompts; `play_plain` comes first."""

    def __init__(self, name: str, target: Path, draft: Path, prompts: Prompts, num_streams: int) -> None:
        self.name = name
        self._target, self._draft = target, draft
        self._prompts = prompts
        self._num_streams = num_streams
        self._plain: dict[str, list[TimedAnswer]] = {}

    @property
    def variants(self) -> list[Variant]:
        drafting = {"draft": str(self._draft), "num_draft_tokens": NUM_DRAFT_TOKENS}
        longest = max(map(len, self._prompts.token_ids)) + self._prompts.num_tokens
        small = {"num_blocks": math.ceil(SMALL_POOL * longest / BLOCK_SIZE), "max_model_len": longest}
        return [
            Variant(f"draft, k={NUM_DRAFT_TOKENS}", drafting),
            Variant("draft, adaptive", drafting | {"num_draft_tokens": 0}, expects_drafts=False),
            Variant(f"n-gram, k={NUM_DRAFT_TOKENS}", drafting | {"draft": "ngram"}),
            Variant(SMALL, drafting | small),
            Variant(KILLED, drafting),
        ]

    def play_plain(self, loop: asyncio.Runner, kinds: list[str]) -> None:
        with SpeculatingDeployment({"model": str(self._target)}) as deployment:
            for kind in kinds:
                played = loop.run(deployment.play(self._slots(kind)))
                self._plain[kind] = played.answers
                say(f"  {self.name}, without drafts, {kind}: {played.num_tokens} tokens in {played.seconds:.1f} s")

    def play(self, loop: asyncio.Runner, variant: Variant, kinds: list[str]) -> list[ModeVerdict]:
        with SpeculatingDeployment({"model": str(self._target), **variant.settings}) as deployment:
            if variant.expects_drafts:
                self._until_drafting(loop, deployment)
            return [self._verdict(loop, deployment, variant, kind) for kind in kinds]

    def _verdict(
        self, loop: asyncio.Runner, deployment: SpeculatingDeployment, variant: Variant, kind: str
    ) -> ModeVerdict:
        before, slots = deployment.counts(), self._slots(kind)
        killing = Killing(deployment, len(self._prompts.token_ids) // 3 if variant.name == KILLED else 0)
        played = loop.run(deployment.play(slots, killing.count))
        counts = deployment.counts().since(before)
        missing = missing_of(variant, counts)
        if variant.name == KILLED and not (killing.killed and self._until_drafting(loop, deployment)):
            missing.append("the draft did not come back")
        differing = self._num_differing(kind, played)
        say(f"  {self.name}, {variant.name}, {kind}: {played.num_tokens} tokens in {played.seconds:.1f} s, "
            f"{differing} prompts differ")  # fmt: skip
        return ModeVerdict(
            pair=self.name,
            variant=variant.name,
            kind=kind,
            num_prompts=len(played.answers),
            num_tokens=played.num_tokens,
            num_differing=differing,
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
            num_preemptions=counts.num_preemptions,
            missing=", ".join(missing),
        )

    def _num_differing(self, kind: str, played: Played) -> int:
        pairs = zip(played.answers, self._plain[kind], strict=True)
        return sum(answer.token_ids != plain.token_ids for answer, plain in pairs)

    def _slots(self, kind: str) -> list[list[Request]]:
        requests = self._prompts.requests(kind)
        return [requests[place :: self._num_streams] for place in range(self._num_streams)]

    def _until_drafting(self, loop: asyncio.Runner, deployment: SpeculatingDeployment) -> bool:
        """Ask until a draft was verified: then the draft has joined.  False where that does not happen."""
        deadline = time.monotonic() + JOIN_SECONDS
        begun = deployment.counts().num_drafts
        while time.monotonic() < deadline:
            loop.run(deployment.play(self._slots("T=0")[:1]))
            if deployment.counts().num_drafts > begun:
                return True
        return False


def missing_of(variant: Variant, counts: Counts) -> list[str]:
    """What was to happen in a variant and did not."""
    found = []
    if variant.expects_drafts and not counts.num_accepted_tokens:
        found.append("no draft accepted")
    if variant.name == SMALL and not counts.num_preemptions:
        found.append("no preemption")
    return found


class Killing:
    """Kills the draft once so many answers have come (0: never); the supervisor starts another."""

    def __init__(self, deployment: SpeculatingDeployment, after: int) -> None:
        self._deployment = deployment
        self._left = after
        self.killed = False

    def count(self) -> None:
        self._left -= 1
        if self._left == 0:
            for pid in self._deployment.pids("draft"):
                os.kill(pid, signal.SIGKILL)
                self.killed = True
