"""Whether a request's time is booked where it went, whether it adds up, and what it costs to know.

    scripts/bench_tracing [--check] [--rounds 3] [--requests 5000] [--seconds 5] [--only delays sums price]

All services are real processes; the worker is a stand-in that takes a fixed time per step.

delays   one request undisturbed and one delayed in one place: the share of the added time that is booked there
sums     thousands of requests that disturb each other: phases against the time from end to end
price    64 streams with tracing and without, in turn: the throughput that it costs
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import uvloop

from scripts.bench.common.clients import full_load, offered
from scripts.bench.common.deployment import LocalDeployment, play, with_stand_in
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.common.turns import rotated
from scripts.bench.tracing.places import PLACES, outcomes
from scripts.bench.tracing.requests import ask, ended

PARTS = ("delays", "sums", "price")
NUM_STREAMS, NUM_TOKENS = 64, 200  # of the price; the lines and latency of each request are the price
WARM = 1.0  # seconds of a round that do not count
SUMS_STREAMS, SUMS_STEP_MS = 32, 4.0
SETTLED = 0.5  # seconds after which the log's last lines are written
PROMPTS, LENGTHS = (4, 24, 96, 300), (1, 4, 8, 24)  # tokens of a prompt and its answer


def delay(name: str, num_rounds: int) -> Result:
    place = PLACES[name]
    found = outcomes(place, num_rounds)
    middle = sorted(found, key=lambda outcome: outcome.share)[len(found) // 2]
    elsewhere = ", ".join(f"{phase} {ms:+.1f}" for phase, ms in middle.elsewhere.items())
    phases = " + ".join(phase.label for phase in place.phases)
    note = f"of {median(outcome.added for outcome in found):,.0f} ms on {phases}"
    print(f"{name}: {middle.share:.2f} % {note}{'; elsewhere ' if elsewhere else ''}{elsewhere}", flush=True)
    return Result(f"{name}: booked there", middle.share, "%", at_least=99, note=note)


def sums(num_requests: int) -> list[Result]:
    """Of requests that disturb each other: the time from end to end beside the sum of the phases, by the log."""
    requests = [ask(n, num_prompt=PROMPTS[n % 4], num_tokens=LENGTHS[n // 4 % 4]) for n in range(num_requests)]
    with with_stand_in(SUMS_STEP_MS, max_num_seqs=24, max_num_batched_tokens=512) as running:
        uvloop.run(play(running.address, [requests[slot::SUMS_STREAMS] for slot in range(SUMS_STREAMS)]))
        time.sleep(SETTLED)
        pairs = [(line["e2e_ms"], sum(line["phases"].values())) for line in ended(running.log_of("gateway"))]
    apart = [abs(whole - parts) for whole, parts in pairs]
    note = f"of {len(pairs):,}; apart by {median(apart):.3f} ms in the middle, {max(apart):.2f} ms at worst"
    return [
        Result("requests whose phases add up to 1 % or 2 ms", share_within(pairs), "%", at_least=99.9, note=note),
        Result("requests that ended", len(pairs), at_least=num_requests),
    ]


def share_within(pairs: Sequence[tuple[float, float]], *, relative: float = 0.01, absolute: float = 2.0) -> float:
    """Percent of them whose two figures differ by no more than one of the two bounds, in milliseconds."""
    good = sum(abs(whole - parts) <= max(relative * whole, absolute) for whole, parts in pairs)
    return 100 * good / max(1, len(pairs))


def price(num_rounds: int, seconds: float, step_ms: float) -> list[Result]:
    """Two deployments side by side, one with tracing and one without; which is loaded first changes with every round.

    The median over rounds, each rate compared with its own neighbour.
    """
    on: list[float] = []
    off: list[float] = []
    size: dict[str, Any] = {"max_num_seqs": NUM_STREAMS, "log_level": "info"}
    with (
        with_stand_in(step_ms, tracing=True, **size) as with_it,
        with_stand_in(step_ms, tracing=False, **size) as without,
    ):
        for number in range(num_rounds + 1):
            arms = [(with_it, on), (without, off)]
            for running, rates in rotated(arms, number):
                rates.append(tokens_per_second(running, seconds))
    del on[0], off[0]  # the round that warms up
    note = f"{mean(on):,.0f} tokens/s with, {mean(off):,.0f} without; {num_rounds} rounds of {seconds:g} s in turn"
    loss = 100 * (1 - median(rate / neighbour for rate, neighbour in zip(on, off, strict=True)))
    return [Result(f"throughput that tracing costs, {NUM_STREAMS} streams", loss, "%", at_most=2, note=note)]


def tokens_per_second(running: LocalDeployment, seconds: float) -> float:
    received = list(offered(running.address, streams=NUM_STREAMS, seconds=seconds, tokens=NUM_TOKENS, channels=4))
    if received[-1].wrong:
        raise RuntimeError(f"streams went wrong: {received[-1].wrong[:3]}")
    first, *_, last = full_load(received, WARM, seconds)
    return (last.tokens - first.tokens) / (last.time - first.time)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of requests for each place")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round of the price")
    parser.add_argument("--price-rounds", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the price's stand-in")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    args = parser.parse_args()
    lines: list[Result] = []
    if "delays" in args.only:
        lines += [delay(name, args.rounds) for name in args.places]
    if "sums" in args.only:
        lines += sums(args.requests)
    if "price" in args.only:
        lines += price(args.price_rounds, args.seconds, args.step_ms)
    return finish(lines, check=args.check, title="tracing: booked where it went, adding up, and its price")
