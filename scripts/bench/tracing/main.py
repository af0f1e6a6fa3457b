"""Whether a request's time is booked where it went, whether it adds up, and what it costs to know.

    scripts/bench_tracing [--check] [--rounds 3] [--requests 5000] [--seconds 5] [--only delays sums price]

All services are real processes; the worker is a stand-in that takes a fixed time per step.

delays   one request undisturbed and one delayed in one place: the share of the added time that is booked there
sums     thousands of requests that disturb each other: phases against the time from end to end
price    64 streams with tracing and without, in turn: the throughput that it costs
"""

from __future__ import annotations

import argparse
import sys
from statistics import mean, median

from scripts.bench.report import Result, add_check, finish
from scripts.bench.tracing.places import PLACES, TracingPlace, outcomes
from scripts.bench.tracing.price import NUM_STREAMS, loss, rates
from scripts.bench.tracing.sums import gaps, share_within, spread

PARTS = ("delays", "sums", "price")


def delays(places: list[str], num_rounds: int) -> list[Result]:
    return [_delay(name, PLACES[name], num_rounds) for name in places]


def _delay(name: str, place: TracingPlace, num_rounds: int) -> Result:
    found = outcomes(place, num_rounds)
    middle = sorted(found, key=lambda outcome: outcome.share)[len(found) // 2]
    elsewhere = ", ".join(f"{phase} {ms:+.1f}" for phase, ms in middle.elsewhere.items())
    phases = " + ".join(phase.label for phase in place.phases)
    note = f"of {median(outcome.added for outcome in found):,.0f} ms on {phases}"
    print(f"{name}: {middle.share:.2f} % {note}{'; elsewhere ' if elsewhere else ''}{elsewhere}", flush=True)
    return Result(f"{name}: booked there", middle.share, "%", at_least=99, note=note)


def sums(num_requests: int) -> list[Result]:
    pairs = gaps(num_requests)
    apart = spread(pairs)
    note = f"of {len(pairs):,}; apart by {apart['median']:.3f} ms in the middle, {apart['worst']:.2f} ms at worst"
    return [
        Result("requests whose phases add up to 1 % or 2 ms", share_within(pairs), "%", at_least=99.9, note=note),
        Result("requests that ended", len(pairs), at_least=num_requests),
    ]


def price(num_rounds: int, seconds: float, step_ms: float) -> list[Result]:
    on, off = rates(num_rounds, seconds, step_ms)
    note = f"{mean(on):,.0f} tokens/s with, {mean(off):,.0f} without; {num_rounds} rounds of {seconds:g} s in turn"
    return [Result(f"throughput that tracing costs, {NUM_STREAMS} streams", loss(on, off), "%", at_most=2, note=note)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
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
        lines += delays(args.places, args.rounds)
    if "sums" in args.only:
        lines += sums(args.requests)
    if "price" in args.only:
        lines += price(args.price_rounds, args.seconds, args.step_ms)
    return finish(lines, check=args.check, title="tracing: booked where it went, adding up, and its price")


if __name__ == "__main__":
    sys.exit(main())
