"""From a rank's parts of a checkpoint to its torch decoder, whose linears gather or add what other ranks have."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.description.ranks import PANEL, Place, cut_spec, widths
from engine.description.spec import AttentionSpec, LayerSpec, ModelSpec
from engine.modeling.ranks.collectives import Collectives
from engine.modeling.ranks.rank_linears import CutEmbedding, GatheredProjection, ReducedProjection
from engine.modeling.ranks.torch_ranks import TorchRankDecoder
from engine.modeling.torch_decoder.assembly import DecoderReader, decoder_of
from engine.modeling.torch_decoder.embedding import Embed
from engine.modeling.torch_decoder.layer_weights import DecoderLayer
from engine.modeling.torch_decoder.projection import Projection
from engine.weights.formats import Formats
from engine.weights.part_source import RankSource
from kernels.interface import Kernels
from kernels.ops.linears.linear import LinearWeight


def build_torch_rank(
    spec: ModelSpec,  # of the whole model, without mixtures of experts
    place: Place,
    source: RankSource,
    formats: Formats,
    kernels: Kernels,
    device: torch.device,
    *,
    max_positions: int,
    dual_batch_threshold: int = 0,
) -> TorchRankDecoder:
    """A rank's model, not connected to the others as yet."""
    reader = RankReader(spec, place, source, formats, kernels, device)
    part = decoder_of(reader, max_positions=max_positions)
    return TorchRankDecoder(part, reader.collectives, dual_batch_threshold=dual_batch_threshold)


class RankReader(DecoderReader):
    """Takes a rank's parts of tensors."""

    def __init__(
        self,
        spec: ModelSpec,  # of the whole model
        place: Place,
        source: RankSource,
        formats: Formats,
        kernels: Kernels,
        device: torch.device,
    ) -> None:
        super().__init__(cut_spec(spec, place), source, formats, kernels, device)
        self.collectives = Collectives(place)
        self._whole, self._place = spec, place

    def embed(self, embedding: Tensor, head: LinearWeight) -> Embed:
        own = self._place.share(self._whole.vocab_size, PANEL)
        return CutEmbedding(super().embed(embedding, head), own.start, own.stop - own.start, self.collectives)

    def layers(self) -> list[DecoderLayer]:
        both = zip(self._whole.layers, super().layers(), strict=True)
        return [self._joined(described, layer) for described, layer in both]

    def _joined(self, described: LayerSpec, layer: DecoderLayer) -> DecoderLayer:
        heads, dense = described.attention, layer.dense
        assert isinstance(heads, AttentionSpec) and dense is not None
        attended = widths(self._place, heads.num_kv_heads, size=heads.group * heads.head_dim)
        inner = widths(self._place, described.mlp.inner, PANEL)
        dense = replace(dense, down=self._linear(dense.down, inner))
        return replace(layer, output=self._linear(layer.output, attended), dense=dense)

    def _linear(self, own: Projection, inputs: tuple[int, ...]) -> Projection:
        """One whose outputs are added to the residual; `inputs`: features that ranks have."""
        if self._place.reduces:
            return ReducedProjection(own.weight, own.bias, self.collectives)
        hidden = widths(self._place, self._whole.hidden_size, PANEL)
        return GatheredProjection(own.weight, own.bias, self.collectives, inputs, hidden)
