"""Picks one token per row: the most likely, or the best of processed logits / temperature + Gumbel noise."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.noise import row_keys
from kernels.provider import SamplingKernels
from shared.modeling.processing import SampleBatch, process_logits
from shared.modeling.sampling_columns import Ints, SamplingColumns
from shared.modeling.truncation import truncate


class Sampler:
    """A pure function of logits, parameters, seed, position."""

    def __init__(self, kernels: SamplingKernels) -> None:
        self._kernels = kernels

    def sample(
        self,
        logits: Tensor,  # [num_sampled, vocab_size] float32, changed in place
        batch: SampleBatch,
    ) -> Tensor:  # [num_sampled] int64
        process_logits(logits, batch)
        chosen = self._kernels.argmax(logits)
        places = batch.columns.drawn(batch.rows)
        if len(places) == len(chosen):
            return self._draw(logits, chosen, batch.columns, batch.rows, batch.lengths)
        if len(places):
            where = torch.from_numpy(places).to(logits.device)
            rows, lengths = batch.rows[places], batch.lengths[places]
            chosen[where] = self._draw(logits[where], chosen[where], batch.columns, rows, lengths)
        return chosen

    def _draw(
        self,
        logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
        likeliest: Tensor,  # [num_rows] int64
        columns: SamplingColumns,
        rows: Ints,  # [num_rows]
        positions: Ints,  # [num_rows]
    ) -> Tensor:  # [num_rows] int64
        device = logits.device
        scaled = logits.div_(torch.from_numpy(columns.temperature[rows]).to(device, logits.dtype)[:, None])
        peak = scaled.gather(1, likeliest[:, None])[:, 0]
        kept = truncate(scaled, peak, columns, rows)
        keys = row_keys(*(torch.from_numpy(column).to(device) for column in (columns.seeds[rows], positions)))
        return self._kernels.gumbel_argmax(scaled, kept.cut, kept.last_tied, keys)
