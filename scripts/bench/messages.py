"""What the messages of one step cost: encoding and decoding of every hop, in processor time.

    scripts/bench_messages [--check] [--sizes 1 64 1024]

What `pageant bench messages` measures, beside its targets.
"""

from __future__ import annotations

from pathlib import Path

from scripts.bench.common.report import Result, bench_parser, finish
from services.cli.bench.messages import hops_of_a_step, measure

MODEL = Path(__file__).resolve().parents[2] / "models" / "pageant-stories"
TARGET_SIZE, TARGET_US = 64, 200.0


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 1024])
    args = parser.parse_args()
    lines = []
    for size in args.sizes:
        total = 0.0
        for hop in hops_of_a_step(size, MODEL):
            encoding, decoding, num_bytes = measure(hop)
            total += encoding + decoding
            note = f"encode {encoding:.1f} us, decode {decoding:.1f} us, {num_bytes:,} bytes"
            lines.append(Result(f"{size} sequences: {hop[0]}", encoding + decoding, "us", note=note))
        bound = TARGET_US if size == TARGET_SIZE else None
        lines.append(Result(f"{size} sequences: all hops", total, "us", at_most=bound))
    return finish(lines, check=args.check, title="messages of one step: encode + decode, processor time")
