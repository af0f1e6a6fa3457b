"""Speculative sampling: whether a draft token is accepted, and what is drawn in place of one that is not.

With p what the target draws from and q what the draft drew its token d from: d is accepted with probability
min(1, p(d) / q(d)), and otherwise a token is drawn from max(0, p - q), normalised.  Either way the token that comes out
has the distribution p, whatever q is.  Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
decoding" (2023); Chen et al., "Accelerating large language model decoding with speculative sampling" (2023).

p is the softmax over what truncation leaves: the tokens above `cut`, and of those equal to it the ones with ids up to
`last_tied`.  Weights are float32, as exact as the uniform numbers that they are held against; their sums are float64,
along one row only.  q comes as few entries: all its tokens that have a chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.sampling.noise import uniform_noise

BLOCK = 1 << 18  # weights held at a time: they stay in a cache


def accepts(
    values: Tensor,  # [n, vocab_size] float32: processed logits / temperature
    cut: Tensor,  # [n] float32
    last_tied: Tensor,  # [n] int64
    draft_ids: Tensor,  # [n] int64
    proposed: Tensor,  # [n] float64: q of the draft tokens
    keys: tuple[Tensor, Tensor],  # each [n] int64, from `kernels.ops.sampling.noise.row_keys`
) -> Tensor:  # [n] bool
    """A row in which truncation leaves nothing, or no numbers, accepts nothing."""
    size = max(1, BLOCK // values.shape[1])
    found = []
    for start in range(0, len(values), size):
        rows = slice(start, start + size)
        weights = _weights(values[rows], cut[rows], last_tied[rows])
        found.append(weights.gather(1, draft_ids[rows, None])[:, 0] / weights.sum(1, dtype=torch.float64))
    return uniform_noise(*keys, draft_ids) * proposed < torch.cat(found)


def log_residual(
    values: Tensor,  # [n, vocab_size] float32: processed logits / temperature
    cut: Tensor,  # [n] float32
    last_tied: Tensor,  # [n] int64
    owners: Tensor,  # [num_entries] int64: the row of each entry of q; below zero: of none
    token_ids: Tensor,  # [num_entries] int64
    probs: Tensor,  # [num_entries] float64
) -> Tensor:  # [n, vocab_size] float32: log of max(0, p - q), not normalised; -inf where it is zero
    size = max(1, BLOCK // values.shape[1])
    found = []
    for start in range(0, len(values), size):
        rows = slice(start, start + size)
        weights = _weights(values[rows], cut[rows], last_tied[rows])
        excess = weights.double().div_(weights.sum(1, keepdim=True, dtype=torch.float64))
        inside = (owners >= start) & (owners < start + size)
        excess.index_put_((owners[inside] - start, token_ids[inside]), -probs[inside], accumulate=True)
        found.append(excess.clamp_(min=0.0).log_().float())
    return torch.cat(found)


def _weights(
    values: Tensor,  # [m, vocab_size] float32
    cut: Tensor,  # [m] float32
    last_tied: Tensor,  # [m] int64
) -> Tensor:  # [m, vocab_size] float32: exp(value - the row's largest), zero for what truncation drops
    weights = (values - values.amax(1, keepdim=True)).exp_()
    if bool((cut > float("-inf")).any()):
        weights.masked_fill_(values < cut[:, None], 0.0)
        rows, token_ids = (values == cut[:, None]).nonzero(as_tuple=True)
        late = token_ids > last_tied[rows]
        weights[rows[late], token_ids[late]] = 0.0
    return weights
