"""A described decoder in native code: a step is one call, which gets pointers and no copies.

It owns the packed weights, in one stretch of memory, and the KV pool, whose layout is the library's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.description.names import Part
from engine.description.spec import NO_ROPE, AttentionSpec, ModelSpec
from engine.lora.adapter import LoraAdapter
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.kv_pool import KVPool, LayerPools, Sliding
from engine.modeling.native.delta import make_states
from engine.modeling.native.layers import LayerPacker, NativeExperts, NativeLayer, NativeNorm, address, describe_layer
from engine.modeling.native.layout import native_layout
from engine.modeling.native.lora import NativeAdapters
from engine.modeling.native.queue import StepQueue
from engine.modeling.rope import build_rope_table
from engine.modeling.torch_decoder.linear_attention import copy_rows
from engine.weights.formats import Formats
from engine.weights.kv_scales import KVScales
from engine.weights.source import WeightSource
from kernels.cpu.binding import abi
from kernels.cpu.binding.native import DraftingColumns, Native, StepColumns
from kernels.cpu.binding.packing import FORMATS, KV_FORMATS, WEIGHT_FORMATS, PackedLinear
from kernels.cpu.binding.queued import CallFlag, QueuedStep
from kernels.cpu.binding.ranks import ExpertMove
from kernels.ops.attention.kv_cache import FP8S
from kernels.ops.sampling.sampled_columns import SampledColumns


@dataclass(frozen=True, slots=True)
class RankFirsts:
    """Features of the whole model before those of a rank."""

    hidden: int
    vocab: int
    layers: tuple[tuple[int, int, int], ...]  # of what attention gives, of the MLP, and of each expert


class NativeDecoder:
    """A `engine.modeling.model.Model`.  The structures that the library reads point into tensors held here."""

    device = torch.device("cpu")

    def __init__(
        self,
        *,
        spec: ModelSpec,
        native: Native,
        formats: Formats,
        embedding: Tensor | None,  # [vocab_size, hidden_size] float32 or bfloat16; None: the head's rows
        positions: Tensor | None,  # [max_position_embeddings, hidden_size] float32, learned
        layers: list[NativeLayer],
        norm: NativeNorm | None,  # None: what comes back is not normed
        head: PackedLinear | None,  # [vocab_size, hidden_size]; None: neither logits nor embeddings are asked of it
        max_positions: int,
        kv_scales: tuple[KVScales, ...] = (),  # of each layer with a cache, in fp8
        firsts: RankFirsts | None = None,  # of a rank of a group, whose heads alone the spec has
    ) -> None:
        self.spec = spec
        self._firsts = firsts
        self._kv_scales = kv_scales if formats.kv in FP8S else ()
        self.layout = native_layout(spec, native, formats)
        self._native = native
        self._held = (embedding, positions, norm)
        self._layers = layers
        self._pool: KVPool | None = None
        self._states: list[tuple[Tensor, Tensor]] = []  # of the layers of linear attention
        self._pools = LayerPools((), ())
        self._layer_structs = (abi.PgLayer * 0)()
        self._logits = torch.empty(0)
        self._columns: StepColumns | None = None
        self._queue = StepQueue(native)
        self._calls = CallFlag()
        self._model = describe(spec, formats)
        self._model.max_positions = max_positions
        self._head = head
        if head is not None:
            self._model.head = head.struct
        if norm is not None:
            self._model.norm = norm.struct
        self._model.positions = address(positions)
        self._structs: list[object] = []  # that the layers' point at
        self._adapters: NativeAdapters | None = None
        if firsts is not None:
            self._model.first_hidden, self._model.first_vocab = firsts.hidden, firsts.vocab
        if embedding is not None:
            self._model.embedding, self._model.embedding_format = embedding.data_ptr(), FORMATS[embedding.dtype]
            if head is None:
                self._model.head.n = len(embedding)  # by which a rank finds whose embeddings it has

    @property
    def head(self) -> PackedLinear:
        assert self._head is not None
        return self._head

    def dense_linears(self) -> Iterator[PackedLinear]:
        """Those that every row goes through, without the head."""
        for layer in self._layers:
            yield from layer.linears.values()

    def layer_bytes(self, block_size: int) -> list[int]:
        return self.layout.layer_bytes(block_size)

    @property
    def state_bytes(self) -> int:
        return self.spec.state_bytes(torch.float32.itemsize)

    def copy_states(
        self,
        sources: Ints,  # [n]
        destinations: Ints,  # [n], distinct
    ) -> None:
        copy_rows([tensor for both in self._states for tensor in both], sources, destinations)

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        self._pools = LayerPools.of((heads.window for heads in self.spec.attentions), num_blocks, sliding)
        self._columns = None
        blocks = self.layout.make_blocks(self._pools.num_blocks, block_size)
        self._structs, each = [], iter(blocks)
        memories = [
            next(each) if layer.delta is None else make_states(layer.delta.described, num_states)
            for layer in self._layers
        ]
        self._states = [both for layer, both in zip(self._layers, memories, strict=True) if layer.delta is not None]
        structs = [layer.struct(both, self._structs) for layer, both in zip(self._layers, memories, strict=True)]
        cached = (struct for struct, layer in zip(structs, self._layers, strict=True) if layer.delta is None)
        for struct, scales in zip(cached, self._kv_scales, strict=False):
            values = scales.keys if struct.latent else scales.values  # a latent is a key and a value
            struct.key_scales, struct.value_scales = scales.keys.data_ptr(), values.data_ptr()
        for struct, first in zip(structs, () if self._firsts is None else self._firsts.layers, strict=False):
            struct.first_attended, struct.first_inner, struct.first_expert = first
        self._model.block_size = block_size
        self._layer_structs = (abi.PgLayer * len(structs))(*structs)
        self._model.layers = self._layer_structs
        self._pool = self._pools.make(block_size, [[tensor for tensor in both if len(tensor.T)] for both in blocks])
        return self._pool

    def reserve_adapters(self, count: int, max_rank: int) -> None:
        self._adapters = NativeAdapters(count, self._native)
        self._model.adapters = self._adapters.table

    def hold_adapter(self, place: int, adapter: LoraAdapter) -> None:
        assert self._adapters is not None
        self._adapters.hold(place, adapter)

    def drop_adapter(self, place: int) -> None:
        assert self._adapters is not None
        self._queue.wait()  # for steps that may name it
        self._adapters.drop(place)

    def forward(self, batch: StepBatch) -> Tensor:
        hidden = torch.empty(batch.num_wanted, self.spec.hidden_size)
        self._native.forward(self._model, self._step(batch), hidden)
        return hidden

    def forward_captured(
        self, batch: StepBatch, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:  # as of `forward`, and [num_tokens, number of layers * hidden_size]
        if not layers:
            everything = self.forward(msgspec.structs.replace(batch, wanted=batch.scheduled))
            return everything[torch.from_numpy(batch.wanted_places())], everything
        step, size = self._step(batch), self.spec.hidden_size
        hidden = torch.empty(batch.num_wanted, size)
        captured = torch.empty(int(batch.scheduled.sum()), len(layers) * size)
        chosen = np.array(layers, np.int32)
        step.captured, step.num_captured, step.captures = chosen.ctypes.data, len(chosen), captured.data_ptr()
        self._native.forward(self._model, step, hidden)
        step.captured, step.num_captured, step.captures = None, 0, None
        return hidden, captured

    def forward_from(
        self,
        batch: StepBatch,
        inputs: Tensor,  # [num_tokens, hidden_size] float32
        beside: Tensor | None = None,  # [num_tokens, 2 * hidden_size], changed
    ) -> Tensor:  # [sum of wanted, hidden_size]
        step, hidden = self._step(batch), torch.empty(batch.num_wanted, self.spec.hidden_size)
        given = inputs.contiguous()
        step.inputs, step.beside = given.data_ptr(), address(beside)
        self._native.forward(self._model, step, hidden)
        step.inputs = step.beside = None
        return hidden

    def draft(self, head: abi.PgHead, batch: StepBatch, asked: DraftingColumns) -> Ints:  # [sum of asked.counts]
        """These layers are the head's."""
        head.layers = ctypes.pointer(self._model)
        return self._native.draft(head, self._step(batch), asked)

    def logits(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # [n] places of held ones, or -1
    ) -> Tensor:  # [n, vocab_size] float32: memory that is used again by the next call
        if len(self._logits) < len(hidden):
            self._logits = torch.empty(len(hidden), self.spec.vocab_size)
        logits = self._logits[: len(hidden)]
        self._native.logits(self._model, hidden, logits, adapters)
        return logits

    def greedy(
        self,
        hidden: Tensor,  # [n, hidden_size]
        adapters: Ints | None = None,  # [n] places of held ones, or -1
    ) -> Tensor:  # [n] int64
        return self._native.greedy(self._model, hidden, adapters)

    def extend(
        self,
        batch: StepBatch,
        count: int,
        temperature: NDArray[np.float64],  # [num_seqs]; 0: the most likely token
        seeds: Ints,  # [num_seqs]
    ) -> Ints:  # [count, num_seqs]
        """As many tokens of every sequence, one after the other; `batch` wants one of each, and its tables have room.

        They are what a sampler takes of rows that have nothing but a temperature and a seed; they stand in the batch's
        `tokens` then.
        """
        return self._native.extend(self._model, self._step(batch), count, temperature.astype(np.float32), seeds)

    @property
    def queues(self) -> bool:
        return not self._model.group

    def take(self, batch: StepBatch, sampled: SampledColumns | None) -> Tensor:
        return self._native.take(self._model, self._step(batch), batch.num_wanted, sampled)

    def queue(self, batch: StepBatch, sampled: SampledColumns | None) -> QueuedStep:
        self._columns_of(batch)
        return self._queue.put(self._model, batch, sampled, self)

    def has_ended(self, step: QueuedStep) -> bool:
        return self._native.await_step(step.number, self._calls)

    def call(self) -> None:
        self._native.call(self._calls)

    def _step(self, batch: StepBatch) -> abi.PgStep:
        columns = self._columns_of(batch)
        return columns.fill(batch.rows, batch.computed, batch.scheduled, batch.wanted, batch.adapters)

    def _columns_of(self, batch: StepBatch) -> StepColumns:
        """Those of the one step that a call computes; the model knows where its tables are then."""
        columns = self._columns
        if columns is None or columns.tokens is not batch.tokens or columns.tables is not batch.block_tables:
            columns = self._columns = StepColumns(batch.tokens, batch.block_tables)
            self._place_tables(batch.block_tables.shape[1])
        return columns

    def _place_tables(self, num_columns: int) -> None:
        """Of each layer in a row of so many, those of all pools beside each other."""
        width = num_columns // len(self._pools.sizes)
        both = zip(self._layer_structs, self._layers, strict=True)
        cached = (struct for struct, layer in both if layer.delta is None)
        for struct, pool in zip(cached, self._pools.pools, strict=True):
            struct.table = pool * width

    # A rank of a group: `join` comes behind `allocate`.

    def join(self, group: abi.PgGroup) -> None:
        """From now on all calls are the group's."""
        self._place_tables(group.table_columns)
        self._model.group = ctypes.pointer(group)

    def follow(self) -> None:
        """Until the group ends."""
        self._native.follow(self._model)

    def copy_group_blocks(self, pool: int, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination) blocks of a pool by its number, in all ranks."""
        width = self._model.group.contents.table_columns // len(self._pools.sizes)
        self._native.copy_group_blocks(self._model, pool * width, copies)

    @property
    def whole_experts(self) -> list[tuple[int, NativeExperts]]:
        """Layers' numbers, and their experts, where ranks have whole ones."""
        each = enumerate(layer.experts for layer in self._layers)
        return [(number, one) for number, one in each if one is not None and one.holders is not None]

    def move_experts(self, layer: int, moves: Sequence[ExpertMove]) -> None:
        """In all ranks, which pack them alike."""
        self._native.move_experts(self._model, layer, moves)

    def use_group_logits(self, memory: Tensor) -> None:
        """`logits` gives views of the group's shared memory, [bytes] uint8."""
        start = self._native.group_logits(self._model) - memory.data_ptr()
        count, width = self._model.group.contents.max_rows, self.spec.vocab_size
        self._logits = memory[start : start + 4 * count * width].view(torch.float32).view(count, width)


def why_unsupported(spec: ModelSpec, native: Native, formats: Formats, block_size: int) -> str:
    """What keeps the native kernels from this model; empty where nothing does."""
    if formats.kv not in KV_FORMATS or not {formats.weights, formats.held_head} <= WEIGHT_FORMATS.keys():
        return f"they do not compute in {formats}"
    held: list[object] = []
    return native.why_unsupported(describe_whole(spec, formats, block_size, held))


def describe_whole(spec: ModelSpec, formats: Formats, block_size: int, held: list[object]) -> abi.PgModel:
    """The dimensions of a model and its layers; what the structure points at goes to `held`."""
    model = describe(spec, formats)
    model.block_size = block_size
    layers = (abi.PgLayer * spec.num_layers)(*(describe_layer(layer, held) for layer in spec.layers))
    model.layers = layers
    held.append(layers)
    return model


def describe(spec: ModelSpec, formats: Formats) -> abi.PgModel:
    """The dimensions, without any memory."""
    return abi.PgModel(
        num_layers=spec.num_layers,
        hidden=spec.hidden_size,
        vocab=spec.vocab_size,
        kv_format=KV_FORMATS[formats.kv],
        round_activations=formats.rounds,
        round_attention=formats.rounds_attention,
        eps=spec.norm.eps,
        embed_scale=spec.embed_scale,
        residual_scale=spec.residual_scale,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap,
    )


def build_native(
    spec: ModelSpec,
    source: WeightSource,
    formats: Formats,
    native: Native,
    *,
    max_positions: int,
    firsts: RankFirsts | None = None,
    begins: bool = True,
    ends: bool = True,
) -> NativeDecoder:
    """A decoder for sequences of up to `max_positions` tokens, packed layer by layer straight from the checkpoint.

    `begins`: it embeds tokens itself; `ends`: it norms what its layers give, and has logits.
    """
    packer, tensors = LayerPacker(spec, source, formats, native), source.tensors
    tied, head, positions = tensors.head is None, None, None
    embedding = _rows(tensors.embedding, source, formats, native) if begins and not tied else None
    if ends or (begins and tied):
        head = packer.head((tensors.embedding if tensors.head is None else tensors.head,))
    if begins and tensors.positions is not None:
        positions = packer.vector((tensors.positions,))
    tables = {which: make_rotation(spec, *which, max_positions) for which in {one.rotation for one in spec.attentions}}
    return NativeDecoder(
        spec=spec,
        native=native,
        formats=formats,
        embedding=embedding,
        positions=positions,
        layers=[
            packer.layer(
                layer, parts, tables[one.rotation] if isinstance(one := layer.attention, AttentionSpec) else None
            )
            for layer, parts in zip(spec.layers, tensors.layers, strict=True)
        ],
        norm=packer.final_norm(tensors.norm) if ends else None,
        head=head,
        max_positions=max_positions,
        kv_scales=source.kv_scales(),
        firsts=firsts,
    )


def _rows(part: Part, source: WeightSource, formats: Formats, native: Native) -> Tensor:
    """The embedding, where it is not the head, as float32 or bfloat16."""
    stored = source.take(part)
    held = torch.bfloat16 if torch.bfloat16 in (stored.dtype, formats.weights) else torch.float32
    rows = native.copy(stored, torch.empty(stored.shape, dtype=held), source.sums(part))
    source.release()
    return rows


def make_rotation(spec: ModelSpec, rope: int, dims: int, max_positions: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin, each [max_positions, dims / 2] float32; None: nothing turns."""
    if rope == NO_ROPE:
        return None
    table = build_rope_table(spec.ropes[rope], dims, max_positions, dtype=torch.float32, device=NativeDecoder.device)
    half = dims // 2
    return table.cos[:, 0, :half].contiguous(), table.sin[:, 0, half:].contiguous()
