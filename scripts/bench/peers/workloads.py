"""The workloads: token ids in, greedy, an end token is ignored, exactly so many tokens out.

    a   one request, 32 -> 128             decoding at batch 1
    b1  32 requests, 128 -> 128            throughput, all alike
    b2  64 requests, 16-512 -> 16-256      throughput, mixed; the same lengths in every round
    c   one request, 2,048 -> 1            prefill
    d   32 requests, 1,024 + 32 -> 16      a shared prefix, all at once and nothing cached

Every round has ids of its own, so that no prefix cache can help from one round to the next; the seed is the name and
the round, so that all engines are asked the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST_ID, LAST_ID = 100, 15_000  # neither special tokens nor those that only pad the vocabulary
WARM = "warm"  # the round before the first
NUM_WARM = 8  # requests of a warm-up

Request = tuple[list[int], int]  # prompt ids, tokens to generate
Draw = Callable[[int], list[int]]
Make = Callable[[Draw], list[Request]]


@dataclass(frozen=True)
class Workload:
    """`unit` is what a speed is counted in; `d`, a matter of latency, is told in seconds."""

    name: str
    what: str
    unit: str
    make: Make

    def requests(self, number: int | str, vocab_size: int) -> list[Request]:
        """The requests of round `number`."""
        stream = random.Random(f"{self.name}-{number}")
        last = min(vocab_size, LAST_ID)
        return self.make(lambda count: [stream.randrange(FIRST_ID, last) for _ in range(count)])

    def warm_up(self, vocab_size: int) -> list[Request]:
        return self.requests(WARM, vocab_size)[:NUM_WARM]

    def speed(self, seconds: float) -> float:
        """Tokens per second, or runs per second where the unit is seconds: more is better."""
        sizes = self.requests(0, LAST_ID)
        if self.unit == SECONDS:
            return 1 / seconds
        if self.unit == PROMPT:
            return sum(len(prompt) for prompt, _ in sizes) / seconds
        return sum(count for _, count in sizes) / seconds

    def told(self, speed: float) -> float:
        """A speed in the workload's own unit."""
        return 1 / speed if self.unit == SECONDS else speed


OUTPUT, PROMPT, SECONDS = "tokens/s", "prompt tokens/s", "s"


def _alike(count: int, num_input: int, num_output: int) -> Make:
    return lambda draw: [(draw(num_input), num_output) for _ in range(count)]


def _mixed(draw: Draw) -> list[Request]:
    lengths = random.Random(7)
    sizes = [(lengths.randint(16, 512), lengths.randint(16, 256)) for _ in range(64)]
    return [(draw(prompt), output) for prompt, output in sizes]


def _shared_prefix(draw: Draw) -> list[Request]:
    prefix = draw(1024)
    return [(prefix + draw(32), 16) for _ in range(32)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("a", "batch 1, 32 in, 128 out", OUTPUT, _alike(1, 32, 128)),
        Workload("b1", "32 x (128 in, 128 out)", OUTPUT, _alike(32, 128, 128)),
        Workload("b2", "64 mixed", OUTPUT, _mixed),
        Workload("c", "prefill of 2,048", PROMPT, _alike(1, 2048, 1)),
        Workload("d", "32 sharing 1,024 tokens", SECONDS, _shared_prefix),
    )
}
