"""What tokens are drawn from, position by position, and the noise that each position's seed gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.sampling.columns import Ints
from engine.sampling.processing import SampleBatch
from engine.sampling.truncation import Truncation, truncate, truncate_by
from kernels.interface import SamplingKernels
from kernels.ops.sampling.noise import row_keys
from kernels.ops.steps.transfer import to_device


@dataclass(frozen=True, slots=True)
class Target:
    """Of some positions, processed logits / temperature, and what truncation leaves of them."""

    values: Tensor  # [n, vocab_size] float32
    peak: Tensor  # [n] float32: the largest of each
    kept: Truncation
    seeds: Ints  # [n]
    positions: Ints  # [n] of the tokens to be drawn

    def keys(self, stream: int = 0) -> tuple[Tensor, Tensor]:
        """Two words of each position [n] int64, for noise of this stream; 0: the one that ordinary tokens take."""
        device = self.values.device
        return row_keys(*(to_device(column, device) for column in (self.seeds ^ stream, self.positions)))

    def draw(self, kernels: SamplingKernels, stream: int = 0) -> Tensor:  # [n] int64
        return kernels.gumbel_argmax(self.values, self.kept.cut, self.kept.last_tied, self.keys(stream))

    def select(self, places: Ints) -> Target:
        where = to_device(places, self.values.device)
        kept = Truncation(self.kept.cut[where], self.kept.last_tied[where])
        return Target(self.values[where], self.peak[where], kept, self.seeds[places], self.positions[places])


def read_target(
    logits: Tensor,  # [num_sampled, vocab_size] float32, processed; changed in place
    likeliest: Tensor,  # [num_sampled] int64
    batch: SampleBatch,
    kernels: SamplingKernels,
) -> Target:
    """Of positions that sample, none that takes the most likely token."""
    columns, rows = batch.columns, batch.rows
    values = logits.div_(to_device(columns.temperature[rows], logits.device).to(logits.dtype)[:, None])
    peak = values.gather(1, likeliest[:, None])[:, 0]
    if kernels.truncation is not None:
        kept = truncate_by(kernels.truncation, values, columns, rows)
    else:
        kept = truncate(values, peak, columns, rows)
    return Target(values, peak, kept, columns.seeds[rows], batch.lengths)


def select_target(
    logits: Tensor,  # [num_sampled, vocab_size] float32, processed
    likeliest: Tensor,  # [num_sampled] int64
    batch: SampleBatch,
    places: Ints,  # [n] of positions that sample
    kernels: SamplingKernels,
) -> tuple[Tensor, Target]:  # the places on the device [n] int64, and a target of copies
    where = to_device(places, logits.device)
    chosen = SampleBatch(batch.rows[places], batch.lengths[places], batch.tokens, batch.columns)
    return where, read_target(logits[where], likeliest[where], chosen, kernels)
