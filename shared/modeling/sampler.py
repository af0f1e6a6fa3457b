"""Picks one token per row: the most likely, or the best of processed logits / temperature + Gumbel noise.

The noise is bounded: a token further below the best than MAX_NOISE minus the noise of the most likely one cannot
win, and is never looked at.  That prune is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.ops.noise import MAX_NOISE, row_keys
from shared.modeling.processing import SampleBatch, process_logits
from shared.modeling.sampling_columns import Ints, SamplingColumns
from shared.modeling.truncation import truncate

PRUNE_MARGIN = 1e-2  # covers the rounding of thresholds to float32


class Sampler:
    """A pure function of logits, parameters, seed, position; `gumbel_noise` is the provider's."""

    def __init__(self, gumbel_noise: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._gumbel_noise = gumbel_noise

    def sample(
        self,
        logits: Tensor,  # [num_sampled, vocab_size] float32, changed in place
        batch: SampleBatch,
    ) -> Tensor:  # [num_sampled] int64
        process_logits(logits, batch)
        chosen = logits.argmax(dim=1)  # the lowest id among equals
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
        logits: Tensor,  # [num_rows, vocab_size] float32
        likeliest: Tensor,  # [num_rows] int64
        columns: SamplingColumns,
        rows: Ints,  # [num_rows]
        positions: Ints,  # [num_rows]
    ) -> Tensor:  # [num_rows] int64
        device = logits.device
        scaled = logits / torch.from_numpy(columns.temperature[rows]).to(device, logits.dtype)[:, None]
        peak = scaled.gather(1, likeliest[:, None])[:, 0]
        kept = truncate(scaled, peak, columns, rows)
        first, second = row_keys(*(torch.from_numpy(column).to(device) for column in (columns.seeds[rows], positions)))
        reachable = peak.double() + self._gumbel_noise(first, second, likeliest) - MAX_NOISE
        prune = (reachable - PRUNE_MARGIN - reachable.abs() * 1e-6).float()
        places, token_ids = (scaled >= torch.maximum(kept.cut, prune)[:, None]).nonzero(as_tuple=True)
        values = scaled[places, token_ids]
        allowed = (values > kept.cut[places]) | (token_ids <= kept.last_tied[places])
        scores = values.double() + self._gumbel_noise(first[places], second[places], token_ids)
        return _winners(scores.masked_fill_(~allowed, float("-inf")), places, token_ids, likeliest)


def _winners(
    scores: Tensor,  # [num_candidates] float64
    places: Tensor,  # [num_candidates] int64 row of each
    token_ids: Tensor,  # [num_candidates] int64
    fallback: Tensor,  # [num_rows] int64, for a row with no candidate: one whose tokens are all masked
) -> Tensor:  # [num_rows] int64: the best of each row, the lowest id among equals
    best = scores.new_full(fallback.shape, float("-inf")).scatter_reduce_(0, places, scores, "amax")
    won = scores == best[places]
    unset = torch.iinfo(torch.int64).max
    lowest = torch.full_like(fallback, unset).scatter_reduce_(0, places[won], token_ids[won], "amin")
    return torch.where(lowest == unset, fallback, lowest)
