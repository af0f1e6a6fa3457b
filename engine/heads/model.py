"""A draft head bound to what runs it: the arithmetic around its layers, the same for all executors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.description.draft_head import HeadSpec
from engine.modeling.batch import StepBatch
from engine.modeling.native.decoder import NativeDecoder
from engine.modeling.torch_decoder.decoder import Decoder

Linear = Callable[[Tensor], Tensor]
HeadLayers = Decoder | NativeDecoder  # that begins with vectors, and ends without a norm; its vocabulary is the drafts'


@dataclass(frozen=True, slots=True)
class AroundWeights:
    """What stands around the layers; what a head does not have is None, or absent."""

    linears: Mapping[str, Linear]  # fuse or combine
    norms: Mapping[str, Tensor]  # by slot
    embedding: Tensor  # [vocab_size of the target, hidden_size], in whatever format it is stored in
    ids: Tensor | None  # [drafts' vocabulary] int64 ids of the target


class HeadModel:
    def __init__(
        self,
        spec: HeadSpec,
        layers: HeadLayers,
        weights: AroundWeights,
        norm: Callable[[Tensor, Tensor, float], Tensor],  # x, weight, eps
    ) -> None:
        self.spec = spec
        self.layers = layers
        self._weights = weights
        self._norm = norm

    def read(
        self,
        captured: Tensor,  # [n, spec.captured_size]
    ) -> Tensor:  # [n, hidden_size]: what positions read of the target
        norms, size = self._weights.norms, self.spec.target_hidden
        if self.spec.capture_norm == "whole":
            captured = self._normed(captured, "capture_norm")
        elif self.spec.capture_norm == "each":
            pieces = zip(torch.split(captured, size, dim=1), torch.split(norms["capture_norm"], size), strict=True)
            eps = self.spec.layers.norm.eps
            captured = torch.cat([self._norm(piece.contiguous(), weight, eps) for piece, weight in pieces], dim=1)
        return self._weights.linears["fuse"](captured) if self.spec.fused else captured

    def run(
        self,
        batch: StepBatch,
        token_ids: Tensor,  # [num_tokens] int64: of each position the token behind it
        positions: Tensor,  # [num_tokens] int64
        hidden: Tensor,  # [num_tokens, hidden_size]
    ) -> Tensor:  # [sum of wanted, hidden_size]
        """Writes keys and values of the batch's positions."""
        embedded = self._weights.embedding[token_ids].to(hidden.dtype)
        if self.spec.skips_first:
            embedded[positions == 0] = 0.0
        if self.spec.embedding_norm:
            embedded = self._normed(embedded, "embedding_norm")
        normed = self._normed(hidden, "hidden_norm") if self.spec.hidden_norm else hidden
        both = torch.cat((embedded, normed), dim=1)
        if self.spec.beside:
            return self.layers.forward_from(batch, normed if self.spec.norms_residual else hidden, both)
        return self.layers.forward_from(batch, self._weights.linears["combine"](both), None)

    def finish(
        self,
        state: Tensor,  # [n, hidden_size], of `run`
    ) -> tuple[Tensor, Tensor]:  # [n, hidden_size] each: what drafts are read from, and what the next positions read
        normed = self._normed(state, "norm") if self.spec.final_norm else state
        return normed, normed if self.spec.feeds_normed else state

    def greedy(
        self,
        normed: Tensor,  # [n, hidden_size]
    ) -> Tensor:  # [n] int64 the likeliest tokens of the target's vocabulary
        token_ids = self.layers.greedy(normed)
        return token_ids if self._weights.ids is None else self._weights.ids[token_ids]

    def logits(
        self,
        normed: Tensor,  # [n, hidden_size]
        vocab_size: int,  # of the target
    ) -> Tensor:  # [n, vocab_size] float32: memory that is used again by the next call, or new
        logits = self.layers.logits(normed)
        if self._weights.ids is None:
            return logits
        wide = logits.new_full((len(logits), vocab_size), float("-inf"))
        wide[:, self._weights.ids] = logits
        return wide

    def _normed(self, x: Tensor, slot: str) -> Tensor:
        return self._norm(x.contiguous(), self._weights.norms[slot], self.spec.layers.norm.eps)
