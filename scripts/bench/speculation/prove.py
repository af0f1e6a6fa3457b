"""The proof that drafts change nothing: all prompts of Spec-Bench, every token id with drafts equal to that without.

    scripts/prove_speculation [--pairs bundled,babyllama] [--prompts 480] [--tokens 64]

Real processes and gRPC.  For each pair and each kind of sampling (temperatures 0, 0.7 and 1.0, and `mixed`: truncation,
penalties, bias, log-probabilities, stop strings), first without drafts, then with: a fixed number of draft tokens, the
adaptive number, n-gram lookup, a pool so small that sequences are preempted, and the draft killed in the middle.  Each
must give the same ids; drafts must have been accepted, and the disturbance must have happened.  Exits with status 1
where any of that is not so; the table comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import uvloop

from scripts.bench.speculation.arms import BUNDLED, BUNDLED_DRAFT
from scripts.bench.speculation.prompts import KINDS, data_directory, spec_bench
from scripts.bench.speculation.proof import Proof
from scripts.bench.speculation.verdict import ModeVerdict, table


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through every `finally`
    verdicts: list[ModeVerdict] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        for proof in proofs(args):
            proof.play_plain(loop, args.kinds)
            for variant in proof.variants:
                if not args.variants or any(word in variant.name for word in args.variants):
                    verdicts += proof.play(loop, variant, args.kinds)
    num_failed = sum(verdict.failed for verdict in verdicts)
    print(f"{table(verdicts)}\n\n{len(verdicts)} comparisons, {num_failed} failed")
    return int(num_failed > 0 or not verdicts)


def proofs(args: argparse.Namespace) -> Iterator[Proof]:
    """The pairs that were asked for, one after the other."""
    models = args.data / "models"
    known = {
        "bundled": (BUNDLED, BUNDLED_DRAFT),
        "babyllama": (models / "babyllama-361", models / "babyllama-361-draft"),
    }
    for name in args.pairs:
        target, draft = known[name]
        prompts = spec_bench(args.data, target, num_tokens=args.tokens, num_prompts=args.prompts)
        yield Proof(name, target, draft, prompts, args.streams)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data_directory(), help="the shared test data")
    parser.add_argument("--pairs", type=words, default=["bundled", "babyllama"])
    parser.add_argument("--kinds", type=words, default=list(KINDS), help=f"of sampling: {','.join(KINDS)}")
    parser.add_argument("--variants", type=words, default=[], help="only those whose name has one of these words in it")
    parser.add_argument("--prompts", type=int, help="only so many")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--streams", type=int, default=32, help="concurrent")
    args = parser.parse_args()
    if not args.data.is_dir():
        parser.error(f"no test data at {args.data}: give --data DIR")
    return args


def words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
