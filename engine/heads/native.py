"""A draft head in native code: reading what the model computed and all drafts behind it are one call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.description.draft_head import HeadSpec
from engine.heads.model import AroundWeights, HeadModel
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.native.decoder import NativeDecoder
from engine.modeling.native.layers import NORM_KINDS, address
from engine.sampling.columns import SamplingColumns
from kernels.cpu.binding import abi
from kernels.cpu.binding.native import DraftingColumns, Native
from kernels.cpu.binding.packing import FORMATS, PackedLinear


class NativeHead(HeadModel):
    """Makes all drafts of a step in one call, where only temperature and truncation change logits.

    Drafts with penalties and the like are left to what a `HeadModel` does step by step.
    """

    def __init__(
        self,
        spec: HeadSpec,
        layers: NativeDecoder,
        weights: AroundWeights,  # whose norms and embedding are float32, the embedding perhaps bfloat16
        linears: Mapping[str, PackedLinear],  # what stands around the layers, as the library reads it, by slot
        native: Native,
    ) -> None:
        super().__init__(spec, layers, weights, native.rms_norm)
        self._decoder = layers
        self._held = linears  # the structure points into them, and into the weights
        self._struct = _describe(spec, weights, linears)

    def draft(
        self,
        batch: StepBatch,  # of the head; wants one of each sequence that gets drafts
        captured: Tensor,  # [num_tokens of the model's step, spec.captured_size]
        firsts: Ints,  # [num_seqs] rows of `captured`: each sequence's first
        counts: Ints,  # [num_seqs] drafts
        columns: SamplingColumns | None,  # None: the likeliest tokens
    ) -> Ints:  # [sum of counts]
        sampled = None if columns is None else columns.sampled(batch.rows)
        return self._decoder.draft(self._struct, batch, DraftingColumns(captured, firsts, counts, sampled))


def _describe(spec: HeadSpec, weights: AroundWeights, linears: Mapping[str, PackedLinear]) -> abi.PgHead:
    head = abi.PgHead(
        embedding=weights.embedding.data_ptr(),
        embedding_format=FORMATS[weights.embedding.dtype],
        vocab=len(weights.embedding),
        ids=address(weights.ids),
        captured=spec.captured_size,
        captured_together=spec.target_hidden if spec.capture_norm == "each" else spec.captured_size,
        norms_residual=spec.norms_residual,
        feeds_normed=spec.feeds_normed,
        skips_first=spec.skips_first,
    )
    for slot, linear in linears.items():
        setattr(head, slot, linear.struct)
    used = {
        "capture_norm": bool(spec.capture_norm),
        "embedding_norm": spec.embedding_norm,
        "hidden_norm": spec.hidden_norm,
        "norm": spec.final_norm,
    }
    for slot in (slot for slot, is_used in used.items() if is_used):
        setattr(head, slot, abi.PgNorm(weights.norms[slot].data_ptr(), None, NORM_KINDS["rms"]))
    return head


def readable(embedding: Tensor) -> Tensor:
    """As the library reads rows: an embedding in another format becomes float32."""
    return embedding.contiguous() if embedding.dtype in (torch.float32, torch.bfloat16) else embedding.float()
