"""Measures the memory that the largest step takes beside weights and KV cache."""

from __future__ import annotations

import numpy as np
import torch

from engine.execution.outputs.scoring import MOST_ROWS
from engine.modeling.batch import StepBatch
from engine.modeling.model import Model
from engine.sampling.logprobs import score
from shared.config import SchedulingSettings, Settings, SpeculationSettings

COPIES = 3  # of the logits that sampling makes at most: raw ones for log-probabilities, counts of tokens, drawn rows
ALL = -1  # log-probabilities: of the whole vocabulary


def most_positions(scheduling: SchedulingSettings, speculation: SpeculationSettings) -> int:
    """Places of a step that are sampled at most: one of each sequence, and one more for each draft token."""
    drafts = 0 if speculation.draft == "off" else speculation.max_num_draft_tokens
    return min(scheduling.max_num_batched_tokens, scheduling.max_num_seqs * (1 + drafts))


def peak_activation(model: Model, settings: Settings, max_model_len: int) -> int:
    """Bytes beyond the present use that a step of max_num_batched_tokens tokens and as many samples as can be needs, of
    a model with `max_model_len` positions."""
    device = model.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    batch = _largest_batch(model, settings, max_model_len)
    model.allocate(1, settings.memory.block_size, num_states=len(batch.rows))
    with torch.inference_mode():
        hidden = model.forward(batch)
        logits = model.logits(hidden[: most_positions(settings.scheduling, settings.speculation)])
        copies = [torch.empty_like(logits) for _ in range(COPIES)]
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=device)[:MOST_ROWS]
        score(logits[:MOST_ROWS], tokens, np.full(len(tokens), ALL))
        del copies
    return torch.cuda.max_memory_allocated(device) - before


def _largest_batch(model: Model, settings: Settings, max_model_len: int) -> StepBatch:
    """Prompts of one length that fill the step, all in block 0: their values do not matter, only their sizes."""
    total = settings.scheduling.max_num_batched_tokens
    longest = min(total, max_model_len)
    lengths = np.array([longest] * (total // longest) + ([total % longest] if total % longest else []))
    rows = np.arange(len(lengths))
    return StepBatch(
        rows=rows,
        computed=np.zeros_like(rows),
        scheduled=lengths,
        wanted=lengths,
        tokens=torch.zeros(len(rows), longest, dtype=torch.int64, device=model.device),
        block_tables=np.zeros((len(rows), -(-longest // settings.memory.block_size)), dtype=np.int64),
        block_size=settings.memory.block_size,
    )
