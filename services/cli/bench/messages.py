"""`pageant bench messages`: encoding and decoding of every hop of one step, in processor time.

The messages are real ones: a scheduler's core plans and takes a result in, a detokenizer's table turns the token batch
into a text batch.  Each hop is one message from the sender's encoder to the receiver's decoder of its whole inbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from services.cli.bench.decoding import DETOKENIZER, WORKER, Decoding
from services.cli.tables import aligned
from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.table import StreamTable
from shared.messages import (
    DetokenizerInbox,
    GatewayInbox,
    Message,
    MessageDecoder,
    SchedulerInbox,
    TextBatch,
    WorkerInbox,
    encode,
)
from shared.tokenization import load_tokenizer

WARM_STEPS = 30
Hop = tuple[str, Message, Any]


def hops_of_a_step(num_sequences: int, model: Path) -> list[Hop]:
    """One steady step's messages, with the union that each receiver decodes."""
    decoding = Decoding(num_sequences)
    table = StreamTable(DecoderFactory(load_tokenizer(model)))
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
    decoder, data = MessageDecoder[Any](union), encode(message)
    assert decoder.decode(data) == message
    return cost(lambda: encode(message)), cost(lambda: decoder.decode(data)), len(data)


def table(sizes: Sequence[int], model: Path) -> str:
    """One row per hop and size."""
    rows = []
    for size in sizes:
        for hop in hops_of_a_step(size, model):
            encoding, decoding, num_bytes = measure(hop)
            rows.append((hop[0], str(size), f"{encoding:.1f}", f"{decoding:.1f}", f"{num_bytes:,}"))
    return aligned(("message", "sequences", "encode, us", "decode, us", "bytes"), rows)
