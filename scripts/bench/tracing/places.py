"""The places where a request is delayed, one at a time, and the phases on which that must be booked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from scripts.bench.common.deployment import with_stand_in
from scripts.bench.tracing.requests import Requester, ask
from shared.tracing.phases import Phase

STEP_MS = 5.0
DELAY = 0.5  # seconds, of one that takes its time once
DELAYED = "scripts.bench.tracing.delayed"
NUM_BLOCKS = 64


@dataclass(frozen=True)
class TracingPlace:
    """How a deployment is set up, and which request is in the measured one's way where it is delayed."""

    phases: tuple[Phase, ...]
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)  # of the measured one
    rival: Mapping[str, Any] = field(default_factory=dict)  # of one that began before it
    step_ms: float = STEP_MS


def delayed(service: str, place: str, seconds: float = DELAY, **more: float) -> dict[str, tuple[str, ...]]:
    words = [word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return {service: (DELAYED, place, "--seconds", str(seconds), *words)}


SMALL = delayed("worker", "none", 0.0, num_blocks=NUM_BLOCKS, step_ms=STEP_MS)
PLACES: Mapping[str, TracingPlace] = {
    "a slow tokenizer": TracingPlace((Phase.TOKENISE,), delayed("tokenizer", "tokenizer")),
    "all rows taken": TracingPlace(
        (Phase.QUEUE_ROWS,), settings={"max_num_seqs": 1, "max_num_batched_tokens": 2048}, rival={"num_tokens": 120}
    ),
    "all blocks held": TracingPlace(
        (Phase.QUEUE_BLOCKS,), SMALL, request={"num_prompt": 120}, rival={"num_prompt": 900, "num_tokens": 120}
    ),
    "a slow step of the prompt": TracingPlace((Phase.PREFILL,), delayed("worker", "prefill", step_ms=STEP_MS)),
    "a slow step of a token": TracingPlace((Phase.DECODE,), delayed("worker", "decode", step_ms=STEP_MS)),
    "a slow draft": TracingPlace(
        (Phase.DRAFT_WAIT,), delayed("draft", "draft", 0.05),
        {"draft": "ngram", "num_draft_tokens": 2, "max_model_len": 1024}, {"num_tokens": 24}, step_ms=60.0,
    ),
    "a storm of preemptions": TracingPlace(
        (Phase.PREEMPTED, Phase.RECOMPUTE), SMALL,
        request={"num_prompt": 400, "num_tokens": 300}, rival={"num_prompt": 400, "num_tokens": 600},
    ),
    "a slow detokenizer": TracingPlace((Phase.DETOKENISE,), delayed("detokenizer", "detokenizer")),
    "a busy gateway": TracingPlace((Phase.GATEWAY,), delayed("gateway", "gateway")),
    "a client that reads late": TracingPlace((Phase.CLIENT_BLOCKED,), delayed("gateway", "client")),
}  # fmt: skip


@dataclass(frozen=True)
class TracingOutcome:
    """Milliseconds that a delay added to a request, and how much of them was booked on its phases, on all others."""

    added: float
    booked: float
    elsewhere: Mapping[str, float]

    @property
    def share(self) -> float:
        """In percent: of what was added, what was booked neither too little nor too much."""
        return 100 * (1 - abs(self.added - self.booked) / self.added)


def outcomes(place: TracingPlace, num_rounds: int) -> list[TracingOutcome]:
    """One request undisturbed and one delayed, again and again, the first pair left out."""
    with (
        with_stand_in(place.step_ms, modules=place.modules, **place.settings) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        requester = Requester(channel, running.log_of("gateway"))
        return [_outcome(place, requester, number) for number in range(num_rounds + 1)][1:]


def _outcome(place: TracingPlace, requester: Requester, number: int) -> TracingOutcome:
    plain = requester.line(ask(3 * number, **place.request))
    rival = requester.begin(ask(3 * number + 1, **place.rival)) if place.rival else None
    late = requester.line(ask(3 * number + 2, is_marked=True, **place.request))
    for _ in rival or ():
        pass
    return compared(plain, late, place.phases)


def compared(plain: Mapping[str, Any], late: Mapping[str, Any], phases: tuple[Phase, ...]) -> TracingOutcome:
    """What one line has more than another."""
    names = plain["phases"].keys() | late["phases"].keys()
    more = {name: late["phases"].get(name, 0.0) - plain["phases"].get(name, 0.0) for name in names}
    booked = sum(more.pop(phase.label, 0.0) for phase in phases)
    return TracingOutcome(late["e2e_ms"] - plain["e2e_ms"], booked, {n: ms for n, ms in more.items() if abs(ms) > 1})
