"""What every model is to the rest: hidden states of a step, logits, and a KV pool whose layout is the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.description.spec import ModelSpec
from engine.lora.adapter import LoraAdapter
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.kv_pool import KVPool, Sliding
from kernels.cpu.binding.queued import QueuedStep
from kernels.ops.sampling.sampled_columns import SampledColumns


class Model(Protocol):
    """A decoder.  `allocate` comes before the first `forward`, which writes the step's keys and values to the pool.

    Returned tensors may be memory of the model's own: they hold until its next call of the same name.
    """

    spec: ModelSpec

    @property
    def device(self) -> torch.device: ...

    def layer_bytes(self, block_size: int) -> list[int]:
        """Of a block of the KV pool, in each layer with a cache."""
        ...

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        """The pool that `forward` works on from now on; one that was there before is dropped.  Layers with a window
        of `sliding` have blocks of their own there.

        A model whose layers keep states has so many of them; that of a row is the one of its number.
        """
        ...

    def forward(self, batch: StepBatch) -> Tensor:
        """Final hidden states [sum of wanted, hidden_size], in order of sequences and positions."""
        ...

    def logits(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # [n] places of held ones whose heads the rows have, or -1
    ) -> Tensor:  # [n, vocab_size] float32
        ...

    def greedy(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # [n] as those of `logits`
    ) -> Tensor:  # [n] int64: the most likely tokens, the lowest id among equals
        ...


@runtime_checkable
class KeepsStates(Protocol):
    """A model some of whose layers keep a state of each sequence."""

    @property
    def state_bytes(self) -> int:
        """Of one sequence, in all layers."""
        ...

    def copy_states(
        self,
        sources: Ints,  # [n]
        destinations: Ints,  # [n], distinct
    ) -> None:
        """In all layers, behind the steps so far."""
        ...


@runtime_checkable
class HasStages(Protocol):
    """A model whose `forward` has two halves: other steps may be begun before one is finished."""

    def begin(self, batch: StepBatch) -> None:
        """The batch's tokens and tables are read now; its rows stay as they are until it is finished."""
        ...

    def finish(self, batch: StepBatch) -> Tensor:
        """As of `forward`, of the batch that was begun first."""
        ...


@runtime_checkable
class Captures(Protocol):
    """A model that shows what it computes of every token, for a draft head."""

    def forward_captured(
        self, batch: StepBatch, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:  # as of `forward`, and [num_tokens, number of layers * hidden_size]
        """What enters these layers, which rise; without any the final hidden states."""
        ...


@runtime_checkable
class HoldsAdapters(Protocol):
    """A model whose linears adapters may change, each sequence's by its own."""

    def reserve_adapters(self, count: int, max_rank: int) -> None:
        """Places for so many, of no larger rank; what is held is dropped."""
        ...

    def hold_adapter(self, place: int, adapter: LoraAdapter) -> None:
        """No step that runs may name the place."""
        ...

    def drop_adapter(self, place: int) -> None:
        """The same."""
        ...


@runtime_checkable
class QueuesSteps(Protocol):
    """A model that may compute steps behind the caller's back, one after the other."""

    @property
    def queues(self) -> bool:
        """Whether it does."""
        ...

    def take(
        self,
        batch: StepBatch,  # wants 0 or 1 of each; none has an adapter
        sampled: SampledColumns | None,  # of its sequences; None: all take the most likely token
    ) -> Tensor:  # [sum of wanted] int64
        """All of a step: the tokens that are taken stand in the batch's `tokens` then."""
        ...

    def queue(self, batch: StepBatch, sampled: SampledColumns | None) -> QueuedStep:
        """The same later.  Until it is computed, its rows' histories and blocks stay as they are; any other call waits
        for it."""
        ...

    def has_ended(self, step: QueuedStep) -> bool:
        """Waits for its end, or until it is called from that."""
        ...

    def call(self) -> None:
        """From any thread."""
        ...


@runtime_checkable
class Extends(Protocol):
    """A model that can make several tokens in one call."""

    def extend(
        self,
        batch: StepBatch,
        count: int,
        temperature: NDArray[np.float64],  # [num_seqs]; 0: the most likely token
        seeds: Ints,  # [num_seqs]
    ) -> Ints:  # [count, num_seqs]
        """As many tokens of every sequence, which stand in the batch's `tokens` then; one of each is wanted."""
        ...
