"""Random decoders in the native kernels, with pools of blocks for their sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.native import KVShape, Native, StepColumns
from kernels.cpu.binding.packing import FORMATS
from tests.kernels.cpu.native.native_models import EPS, Decoder

BLOCK_SIZE = 16
Ints = NDArray[np.int64]


class Running:
    """A decoder in the native kernels, with a pool of blocks for some sequences."""

    def __init__(
        self,
        native: Native,
        decoder: Decoder,
        sequences: Sequence[Tensor],  # of token ids [n]
        *,
        weights: torch.dtype = torch.float32,
        kv: torch.dtype = torch.float32,
        rounds: bool = False,
        room: int = 0,  # for further tokens of each
    ) -> None:
        self._native, self.sequences = native, sequences
        first = decoder.layers[0]
        longest = max(map(len, sequences)) + room
        num_blocks = -(-longest // BLOCK_SIZE)
        order = torch.randperm(len(sequences) * num_blocks, generator=torch.Generator().manual_seed(5))
        self.tables = order.view(len(sequences), num_blocks).numpy()
        self.tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
        for row, sequence in zip(self.tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        shapes = [KVShape(kv, BLOCK_SIZE, *layer.heads[1:]) for layer in decoder.layers]
        sizes = [(native.key_bytes(shape), native.value_bytes(shape)) for shape in shapes]  # of latents values alone
        pools = [[torch.zeros(len(order), size, dtype=torch.uint8) for size in both] for both in sizes]
        structs = [layer.struct(native, weights, pool) for layer, pool in zip(decoder.layers, pools, strict=True)]
        head = decoder.head.pack(native, weights)
        self._held = (decoder, pools, head)
        given = {"embedding": decoder.embedding, "positions": decoder.positions}
        self.model = abi.PgModel(
            num_layers=len(structs),
            hidden=first.hidden,
            vocab=head.n,
            block_size=BLOCK_SIZE,
            kv_format=FORMATS[kv],
            round_activations=rounds,
            round_attention=rounds,
            max_positions=longest,
            eps=EPS,
            embed_scale=decoder.embed_scale,
            residual_scale=decoder.residual_scale,
            logit_scale=decoder.logit_scale,
            logit_softcap=decoder.logit_softcap,
            norm=decoder.norm.struct,
            head=head.struct,
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in given.items()},
            layers=(abi.PgLayer * len(structs))(*structs),
        )
        assert native.why_unsupported(self.model) == ""
        self._columns = StepColumns(self.tokens, self.tables)

    def step(self, scheduled: Mapping[int, tuple[int, int]], wanted: int = 0) -> abi.PgStep:
        """Of each sequence, the tokens from one position to another; all, or the last `wanted`, give a hidden state."""
        begins, ends = np.array(list(scheduled.values())).T
        counts = ends - begins
        return self._columns.fill(np.array(list(scheduled)), begins, counts, np.minimum(wanted or counts, counts))

    def forward(self, scheduled: Mapping[int, tuple[int, int]]) -> list[Tensor]:
        """The hidden states [n, hidden] of each."""
        counts = [end - begin for begin, end in scheduled.values()]
        hidden = torch.empty(sum(counts), self.model.hidden)
        self._native.forward(self.model, self.step(scheduled), hidden)
        return list(torch.split(hidden, counts))

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.empty(len(hidden), self.model.vocab)
        self._native.logits(self.model, hidden, logits)
        return logits

    def greedy(self, hidden: Tensor) -> Tensor:
        return self._native.greedy(self.model, hidden)

    def extend(self, scheduled: Mapping[int, tuple[int, int]], count: int) -> Ints:  # [count, num_seqs]
        zeros = np.zeros(len(scheduled))
        step = self.step(scheduled, 1)
        return self._native.extend(self.model, step, count, zeros.astype(np.float32), zeros.astype(np.int64))


def rope(
    head_dim: int, base: float, max_positions: int = 1024
) -> tuple[Tensor, Tensor]:  # [max_positions, head_dim / 2]
    angles = torch.arange(max_positions)[:, None] * base ** (-torch.arange(0, head_dim, 2) / head_dim)
    return angles.cos(), angles.sin()
