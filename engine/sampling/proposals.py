"""The distributions that draft tokens were drawn from: few tokens each, packed on the wire, columns in a step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.sampling.columns import Floats, Ints
from engine.sampling.target import Target
from engine.sampling.truncation import kept_tokens
from shared.errors import FatalError
from shared.messages.steps import DraftDistribution
from shared.packing import pack_tokens

CERTAIN = np.ones(1, "<f4").tobytes()
TOLERANCE = 1e-3  # of a distribution's sum: float32, and the draft's own rounding


class Proposals(msgspec.Struct, frozen=True):
    """Of a step's draft tokens, one after the other: what had a chance, and how much of one."""

    owners: Ints  # [num_entries] index of the draft token, in order
    token_ids: Ints  # [num_entries]
    probs: Floats  # [num_entries]
    own: Floats  # [num_drafts] the probability of the draft token itself


def certain(token_id: int) -> DraftDistribution:
    """Of a draft that could be no other."""
    return DraftDistribution(token_ids=pack_tokens((token_id,)), probs=CERTAIN)


def pack_distributions(
    target: Target,
    drawn: Tensor,  # [n] int64
) -> list[DraftDistribution]:  # n
    """What the tokens were drawn from: those that truncation leaves, normalised.

    A token that has no chance there counts as certain: where a request forbids everything, or a draft's logits are not
    all finite.  Rejection is exact for that too, and no worker refuses it.
    """
    rows, token_ids = kept_tokens(target.kept, target.values)
    weights = (target.values[rows, token_ids].double() - target.peak[rows]).exp_()
    totals = weights.new_zeros(len(drawn)).index_add_(0, rows, weights)
    chances = weights / totals[rows]
    own = torch.zeros_like(totals).index_add_(0, rows, torch.where(token_ids == drawn[rows], chances, 0.0))
    ids = token_ids.to(torch.int32).cpu().numpy().astype("<i4")
    probs = chances.cpu().numpy().astype("<f4")
    packed, start = [], 0
    counts = torch.bincount(rows, minlength=len(drawn))
    for token, count, chance in zip(drawn.tolist(), counts.tolist(), own.tolist(), strict=True):
        end = start + count
        one = DraftDistribution(token_ids=ids[start:end].tobytes(), probs=probs[start:end].tobytes())
        packed.append(one if chance > 0 else certain(token))  # none at all, or not a number
        start = end
    return packed


def certain_proposals(draft_ids: Ints) -> Proposals:
    """For drafts that come without distributions."""
    ones = np.ones(len(draft_ids))
    return Proposals(np.arange(len(draft_ids)), draft_ids, ones, ones)


def unpack_distributions(distributions: Sequence[DraftDistribution], draft_ids: Ints, vocab_size: int) -> Proposals:
    """One for each draft token.  Raises FatalError where one cannot be what its token was drawn from."""
    counts = np.array([len(one.token_ids) // 4 for one in distributions], np.int64)
    if len(counts) != len(draft_ids) or not counts.all():
        raise FatalError(f"plan has {len(counts)} distributions, some may be empty, for {len(draft_ids)} draft tokens")
    if any(len(one.token_ids) != len(one.probs) or len(one.probs) % 4 for one in distributions):
        raise FatalError("a draft token's distribution must have one probability for each of its tokens")
    token_ids = np.frombuffer(b"".join([one.token_ids for one in distributions]), "<i4").astype(np.int64)
    probs = np.frombuffer(b"".join([one.probs for one in distributions]), "<f4").astype(np.float64)
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise FatalError(f"a draft token's distribution names a token outside the vocabulary of {vocab_size}")
    owners = np.repeat(np.arange(len(counts)), counts)
    sums = np.bincount(owners, probs)
    if not (probs >= 0).all() or not (np.abs(sums - 1) <= TOLERANCE).all():
        raise FatalError("a draft token's distribution has probabilities that do not sum to one")
    same = token_ids == draft_ids[owners]
    own: Floats = np.zeros(len(draft_ids))
    np.add.at(own, owners[same], probs[same])
    if not own.all():
        raise FatalError("a draft token has no probability in its own distribution")
    return Proposals(owners, token_ids, probs, own)
