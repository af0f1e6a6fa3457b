"""What ranks that compute with torch do otherwise than one process: two linears of a layer, and the embedding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.modeling.ranks.collectives import Collectives
from engine.modeling.torch_decoder.embedding import Embed
from engine.modeling.torch_decoder.projection import Projection
from kernels.interface import Kernels


@dataclass(frozen=True, slots=True)
class GatheredProjection(Projection):
    """Has some of the output features, and reads all input features, of which each rank has made some."""

    collectives: Collectives
    inputs: tuple[int, ...]  # features of each rank
    outputs: tuple[int, ...]

    def __call__(
        self,
        kernels: Kernels,
        x: Tensor,  # [num_tokens, inputs[rank]]
    ) -> Tensor:  # [num_tokens, sum of outputs]
        own = kernels.linear(self.collectives.gather(x, self.inputs), self.weight, self.bias)
        return self.collectives.gather(own, self.outputs)


@dataclass(frozen=True, slots=True)
class ReducedProjection(Projection):
    """Reads some of the input features; what ranks make of theirs is added, and then the bias, once."""

    collectives: Collectives

    def __call__(
        self,
        kernels: Kernels,
        x: Tensor,  # [num_tokens, in_features of the rank]
    ) -> Tensor:  # [num_tokens, out_features]
        total = self.collectives.add(kernels.linear(x, self.weight, None))
        return total if self.bias is None else total + self.bias


@dataclass(frozen=True, slots=True)
class CutEmbedding:
    """Some rows of the vocabulary.  Each token's row is one rank's, and zero at all others, so their sum is exact."""

    rows: Embed  # by the number among the rank's own
    first: int  # token id
    count: int  # of the rank's rows
    collectives: Collectives

    def __call__(
        self,
        token_ids: Tensor,  # [n] int64
    ) -> Tensor:  # [n, hidden_size]
        places = token_ids - self.first
        elsewhere = (places < 0) | (places >= self.count)
        found = self.rows(places.clamp(0, self.count - 1))
        return self.collectives.add(found.masked_fill(elsewhere[:, None], 0))
