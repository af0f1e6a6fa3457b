"""Steps as the scheduler's log tells of them where `log_steps` is on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from services.cli.trace.reading import LogEntry


class StepSpan(msgspec.Struct, frozen=True):
    """One step of a worker.  Two are in flight at a time: it is drawn from the end of the one before."""

    worker: str
    step_id: int
    start: float  # Unix seconds
    end: float
    num_tokens: int
    num_prefill_tokens: int
    num_draft_tokens: int
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    sequences: list[list[Any]]  # (request id, index, tokens) of each

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def name(self) -> str:
        return f"step {self.step_id}: {len(self.sequences)} sequences, {self.num_tokens} tokens"


COUNTS = (
    "num_tokens", "num_prefill_tokens", "num_draft_tokens", "num_running", "num_waiting", "num_used_blocks",
    "num_blocks",
)  # fmt: skip


def step_spans(entries: Iterable[LogEntry]) -> list[StepSpan]:
    """Steps in the order in which they ended."""
    ended: dict[str, float] = {}
    spans = []
    for entry in sorted(entries, key=lambda entry: entry.time + entry.fields.get("ms", 0.0) / 1000):
        fields = entry.fields
        worker, end = str(fields.get("worker", "")), entry.time + float(fields.get("ms", 0.0)) / 1000
        start = min(max(entry.time, ended.get(worker, entry.time)), end)
        ended[worker] = end
        counts = {name: int(fields.get(name, 0)) for name in COUNTS}
        sequences = [list(sequence) for sequence in fields.get("sequences", [])]
        spans.append(StepSpan(worker, int(fields.get("step_id", 0)), start, end, **counts, sequences=sequences))
    return spans
