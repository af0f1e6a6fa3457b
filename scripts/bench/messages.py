"""What the messages of one step cost: encoding and decoding of every hop, in processor time.

    scripts/bench_messages [--check] [--sizes 1 64 1024]

The messages are real ones: a scheduler's core plans and takes a result in, a detokenizer's table turns the token batch
into a text batch.  Each hop is one message from the sender's encoder to the receiver's decoder of its whole inbox.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from scripts.bench.decoding import DETOKENIZER, WORKER, Decoding
from scripts.bench.report import Line, add_check, finish
from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.table import StreamTable
from shared.messages import (
    Decoder,
    DetokenizerInbox,
    GatewayInbox,
    Message,
    SchedulerInbox,
    TextBatch,
    WorkerInbox,
    encode,
)
from shared.tokenization import load_tokenizer

MODEL = Path(__file__).resolve().parents[2] / "models" / "pageant-stories"
TARGET_SIZE, TARGET_US = 64, 200.0
WARM_STEPS = 30
Hop = tuple[str, Message, Any]


def hops_of_a_step(num_sequences: int) -> list[Hop]:
    """One steady step's messages, with the union that each receiver decodes."""
    decoding = Decoding(num_sequences)
    table = StreamTable(DecoderFactory(load_tokenizer(MODEL)))
    hops: list[Hop] = []
    for _ in range(WARM_STEPS):
        plan = decoding.plan()
        assert plan is not None
        result = decoding.answer(plan)
        decoding.core.apply(WORKER, result)
        tokens = decoding.core.outbound.take_batches()[DETOKENIZER]
        table.apply(tokens)
        (sequences,) = table.take_texts().values()
        texts = TextBatch(sequences)
        hops = [
            ("plan", plan, WorkerInbox),
            ("result", result, SchedulerInbox),
            ("token batch", tokens, DetokenizerInbox),
            ("text batch", texts, GatewayInbox),
        ]
    return hops


def cost(work: Any, repeats: int = 200, rounds: int = 9) -> float:
    """Microseconds of one call: the median round."""
    times = []
    for _ in range(rounds):
        start = process_time()
        for _ in range(repeats):
            work()
        times.append(1e6 * (process_time() - start) / repeats)
    return median(times)


def measure(hop: Hop) -> tuple[float, float, int]:
    """(encode, decode) in microseconds, and bytes on the wire."""
    _, message, union = hop
    decoder, data = Decoder[Any](union), encode(message)
    assert decoder.decode(data) == message
    return cost(lambda: encode(message)), cost(lambda: decoder.decode(data)), len(data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 1024])
    args = parser.parse_args()
    lines = []
    for size in args.sizes:
        total = 0.0
        for hop in hops_of_a_step(size):
            encoding, decoding, num_bytes = measure(hop)
            total += encoding + decoding
            note = f"encode {encoding:.1f} us, decode {decoding:.1f} us, {num_bytes:,} bytes"
            lines.append(Line(f"{size} sequences: {hop[0]}", encoding + decoding, "us", note=note))
        bound = TARGET_US if size == TARGET_SIZE else None
        lines.append(Line(f"{size} sequences: all hops", total, "us", at_most=bound))
    return finish(lines, check=args.check, title="messages of one step: encode + decode, processor time")


if __name__ == "__main__":
    sys.exit(main())
