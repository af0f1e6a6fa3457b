"""Embeddings as a request asks for them: which hidden states of the prompt make one vector."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class PoolingKind(StrEnum):
    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean over all tokens
    CLASSIFY = "classify"  # the last one's, as the scores of the model's labels


class Pooling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The prompt's last hidden states in one vector; with `normalize`, of length 1, or as probabilities of labels."""

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
