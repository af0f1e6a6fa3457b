"""The native kernels behind tensors: what ctypes cannot check, dtypes, shapes, contiguity, is checked here.

`kernels.cpu.binding.loading` compiles or finds the library.  Calls release the interpreter's lock.  All models of a
process share one team of threads, and take turns at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, pointer
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.contents import check
from kernels.cpu.binding.packing import FORMATS, KV_FORMATS, PackedLinear
from kernels.cpu.binding.queued import QueuedStep
from kernels.cpu.binding.ranks import RankCalls
from kernels.ops.sampling.sampled_columns import SampledColumns

UNSUPPORTED = {
    1: "head_dim is no multiple of 16, or above 576",
    2: "hidden_size or intermediate_size is no multiple of 16",
    3: "block_size is smaller than a vector",
    4: "more than 96 query heads share a KV head",
    5: "its activation needs a gate",
    6: "the experts' intermediate size is no multiple of 16",
    7: "a token takes more than 64 experts, or more than there are",
    8: "its experts are not in up to 64 groups of one size that hold what a token takes",
    9: "a dimension of its latent attention is no multiple of 16",
    10: "its linear attention has heads of no multiple of 16, or its convolution does not see 2 to 4 tokens",
}
_NONE = POINTER(abi.PgLora)()
OTHERWISE_UNSUPPORTED = "its dimensions are not served"


class NativeUnavailable(Exception):
    """The native kernels cannot serve here, or not this model; says why."""


@dataclass(frozen=True, slots=True)
class DraftingColumns:
    """What a draft head is asked for behind a step; without `sampled` the likeliest tokens."""

    captured: Tensor  # [num_tokens of the model's step, captured features] float32
    firsts: NDArray[np.int64]  # [num_seqs] rows there of the sequences' first tokens
    counts: NDArray[np.int64]  # [num_seqs] drafts
    sampled: SampledColumns | None = None


@dataclass(frozen=True, slots=True)
class KVShape:
    """The dimensions that a layer's KV pool depends on."""

    dtype: torch.dtype
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        return KV_FORMATS[self.dtype], self.block_size, self.num_kv_heads, self.head_dim


class StepColumns:
    """The structure of a step, made once for two tables; each step overwrites its columns."""

    def __init__(
        self,
        tokens: Tensor,  # [num_rows, longest] int64
        tables: NDArray[np.int64],  # [num_rows, max_num_blocks] block ids
    ) -> None:
        check(tokens, torch.int64, tuple(tokens.shape))
        if tables.dtype != np.int64 or not tables.flags.c_contiguous:
            raise ValueError("block tables must be contiguous int64")
        self.tokens, self.tables = tokens, tables
        self._columns = np.zeros((5, len(tables)), np.int64)
        addresses = [column.ctypes.data for column in (*self._columns[:4], tables)]
        strides = (tokens.stride(0), tables.shape[1])
        self._adapters = self._columns[4].ctypes.data
        self._step = abi.PgStep(0, *addresses[:4], tokens.data_ptr(), addresses[4], *strides)

    def fill(
        self,
        rows: NDArray[np.int64],  # [num_seqs], as `engine.modeling.batch` says
        computed: NDArray[np.int64],  # [num_seqs]
        scheduled: NDArray[np.int64],  # [num_seqs]
        wanted: NDArray[np.int64],  # [num_seqs]
        adapters: NDArray[np.int64] | None = None,  # [num_seqs] places of held ones, or -1
    ) -> abi.PgStep:
        """Holds until the next call."""
        num_seqs, columns = len(rows), self._columns
        columns[0, :num_seqs], columns[1, :num_seqs] = rows, computed
        columns[2, :num_seqs], columns[3, :num_seqs] = scheduled, wanted
        self._step.num_seqs = num_seqs
        self._step.adapters = None if adapters is None else self._adapters
        if adapters is not None:
            columns[4, :num_seqs] = adapters
        return self._step


class Native(RankCalls):
    """One loaded library, and its team."""

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """At the end of the block: the clock's cycles of all threads together, by what they did in it."""
        cycles = dict.fromkeys(abi.PHASES, 0)
        found = np.zeros(len(cycles), np.int64)
        self._call(self._functions.pg_count, 1)
        try:
            yield cycles
        finally:
            self._call(self._functions.pg_count, 0)
            self._call(self._functions.pg_counted, found.ctypes.data)
            cycles.update(zip(abi.PHASES, found.tolist(), strict=True))

    def spin(self, kind: int, rounds: int) -> int:
        """Rounds of one instruction (PgPeak) by every thread: the operations that were done, 0 where it is lacking."""
        return int(self._answer(self._functions.pg_peak, kind, rounds))

    def read(self, memory: Tensor) -> None:
        """All of it, by all threads together."""
        self._call(self._functions.pg_read, memory.data_ptr(), memory.nbytes)

    def why_unsupported(self, model: abi.PgModel) -> str:
        """Empty where the model is served; of its layers only the numbers are looked at."""
        code = self._functions.pg_supports(byref(model))
        return UNSUPPORTED.get(code, OTHERWISE_UNSUPPORTED) if code else ""

    def key_bytes(self, shape: KVShape) -> int:
        """Of one block of one layer."""
        return int(self._functions.pg_key_bytes(*shape.arguments))

    def value_bytes(self, shape: KVShape) -> int:
        """Of one block of one layer."""
        return int(self._functions.pg_value_bytes(*shape.arguments))

    def forward(
        self,
        model: abi.PgModel,
        step: abi.PgStep,
        hidden: Tensor,  # [sum of wanted, hidden] float32, written
    ) -> None:
        self._call(self._functions.pg_forward, byref(model), byref(step), hidden.data_ptr())

    def logits(
        self,
        model: abi.PgModel,
        hidden: Tensor,  # [n, hidden] float32
        logits: Tensor,  # [n, vocab] float32, written
        adapters: NDArray[np.int64] | None = None,  # [n] of the model's, or -1
    ) -> None:
        check(hidden, torch.float32, (len(logits), model.hidden))
        check(logits, torch.float32, (len(hidden), model.vocab))
        chosen = None if adapters is None else np.ascontiguousarray(adapters, np.int64)
        address = None if chosen is None else chosen.ctypes.data
        self._call(self._functions.pg_logits, byref(model), hidden.data_ptr(), len(hidden), address, logits.data_ptr())

    def greedy(
        self,
        model: abi.PgModel,
        hidden: Tensor,  # [n, hidden] float32
        adapters: NDArray[np.int64] | None = None,  # [n] of the model's, or -1
    ) -> Tensor:  # [n] int64
        check(hidden, torch.float32, (len(hidden), model.hidden))
        token_ids = torch.empty(len(hidden), dtype=torch.int64)
        chosen = None if adapters is None else np.ascontiguousarray(adapters, np.int64)
        address = None if chosen is None else chosen.ctypes.data
        self._call(
            self._functions.pg_greedy, byref(model), hidden.data_ptr(), len(hidden), address, token_ids.data_ptr()
        )
        return token_ids

    def extend(
        self,
        model: abi.PgModel,
        step: abi.PgStep,
        count: int,
        temperature: NDArray[np.float32],  # [num_seqs]; 0: the most likely
        seeds: NDArray[np.int64],  # [num_seqs]
    ) -> NDArray[np.int64]:  # [count, num_seqs]
        """Tokens of as many steps, which are appended to the step's too."""
        token_ids = np.empty((count, step.num_seqs), np.int64)
        columns = np.ascontiguousarray(temperature, np.float32), np.ascontiguousarray(seeds, np.int64)
        sampling = abi.PgSampling(*(column.ctypes.data for column in columns))
        self._call(self._functions.pg_extend, byref(model), byref(step), count, byref(sampling), token_ids.ctypes.data)
        return token_ids

    def take(
        self,
        model: abi.PgModel,
        step: abi.PgStep,  # wants 0 or 1 of each
        num_wanted: int,
        sampled: SampledColumns | None,  # None: the most likely tokens
    ) -> Tensor:  # [num_wanted] int64
        """The tokens of one step, which are appended to the step's too."""
        token_ids, sampling = torch.empty(num_wanted, dtype=torch.int64), _sampling(sampled)
        self._call(self._functions.pg_extend, byref(model), byref(step), 1, byref(sampling), token_ids.data_ptr())
        return token_ids

    def queue(
        self,
        model: abi.PgModel,  # of no group
        step: abi.PgStep,  # wants 0 or 1 of each
        num_wanted: int,
        sampled: SampledColumns | None,  # None: the most likely tokens
        *held: object,  # what model and step point at
    ) -> QueuedStep:
        """As `take`, in a thread of the library.  This waits only while a call has the team."""
        queued = QueuedStep(self._functions, num_wanted, sampled, *held)
        addresses = queued.token_ids.data_ptr(), queued.elapsed.ctypes.data
        with self._turn:
            number = self._functions.pg_queue(byref(model), byref(step), byref(_sampling(sampled)), *addresses)
            self._num_queued = queued.number = number
        return queued

    def draft(
        self, head: abi.PgHead, step: abi.PgStep, asked: DraftingColumns
    ) -> NDArray[np.int64]:  # [sum of counts], those of a sequence behind each other
        """Computes the head's step, and goes on alone."""
        check(asked.captured, torch.float32, (len(asked.captured), head.captured))
        counts, sampled = asked.counts, asked.sampled
        drafts = np.empty(int(counts.sum()), np.int64)
        columns = asked.captured.data_ptr(), asked.firsts.ctypes.data, counts.ctypes.data
        struct = abi.PgDrafting(*columns, _sampling(sampled))
        self._call(self._functions.pg_draft, byref(head), byref(step), byref(struct), drafts.ctypes.data)
        return drafts

    def linear(
        self,
        x: Tensor,  # [m, k] float32
        weight: PackedLinear,  # [n, k]
        *,
        rounds: bool = False,  # x to bfloat16
    ) -> Tensor:  # [m, n] float32
        check(x, torch.float32, (len(x), weight.k))
        out = torch.empty(len(x), weight.n)
        self._call(self._functions.pg_linear, byref(weight.struct), rounds, x.data_ptr(), len(x), out.data_ptr())
        return out

    def rms_norm(
        self,
        x: Tensor,  # [m, hidden] float32
        weight: Tensor,  # [hidden] float32
        eps: float,
    ) -> Tensor:  # [m, hidden] float32
        return self._norm(x, weight, None, abi.RMS_NORM, eps)

    def layer_norm(
        self,
        x: Tensor,  # [m, hidden] float32
        weight: Tensor,  # [hidden] float32
        bias: Tensor | None,  # [hidden] float32
        eps: float,
    ) -> Tensor:  # [m, hidden] float32
        return self._norm(x, weight, bias, abi.LAYER_NORM, eps)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: int, eps: float) -> Tensor:
        check(x, torch.float32, tuple(x.shape))
        for given in (weight,) if bias is None else (weight, bias):
            check(given, torch.float32, (x.shape[1],))
        out = torch.empty_like(x)
        norm = abi.PgNorm(weight.data_ptr(), None if bias is None else bias.data_ptr(), kind)
        self._call(self._functions.pg_norm, byref(norm), x.data_ptr(), eps, *x.shape, out.data_ptr())
        return out

    def store_kv(
        self,
        shape: KVShape,
        key: Tensor,  # [m, num_kv_heads, head_dim] float32
        value: Tensor,  # [m, num_kv_heads, head_dim] float32
        slots: Tensor,  # [m] int64
        keys: Tensor,  # [num_blocks, key_bytes] uint8, written
        values: Tensor,  # [num_blocks, value_bytes] uint8, written
    ) -> None:
        for given in (key, value):
            check(given, torch.float32, (len(slots), shape.num_kv_heads, shape.head_dim))
        check(slots, torch.int64, (len(slots),))
        check(keys, torch.uint8, (len(keys), self.key_bytes(shape)))
        check(values, torch.uint8, (len(keys), self.value_bytes(shape)))
        addresses = [given.data_ptr() for given in (key, value, slots)]
        self._call(
            self._functions.pg_store_kv, *shape.arguments, *addresses, len(slots), keys.data_ptr(), values.data_ptr()
        )

    def attention(
        self,
        model: abi.PgModel,
        layer: abi.PgLayer,
        step: abi.PgStep,
        query: Tensor,  # [num_tokens, num_heads, head_dim] float32, after rotation
    ) -> Tensor:  # [num_tokens, num_heads, head_dim, or the latent's rank] float32
        check(query, torch.float32, (len(query), layer.num_heads, layer.head_dim))
        value_dim = layer.latent.contents.rank if layer.latent else layer.head_dim
        out = torch.empty(*query.shape[:2], value_dim)
        self._call(
            self._functions.pg_attention, byref(model), byref(layer), byref(step), query.data_ptr(), out.data_ptr()
        )
        return out

    def feed_forward(
        self,
        model: abi.PgModel,
        layer: abi.PgLayer,
        x: Tensor,  # [m, hidden] float32, after the norm
    ) -> Tensor:  # [m, hidden] float32
        check(x, torch.float32, (len(x), model.hidden))
        out = torch.empty_like(x)
        self._call(self._functions.pg_feed_forward, byref(model), byref(layer), x.data_ptr(), len(x), out.data_ptr())
        return out

    @property
    def lora_width(self) -> int:
        """Columns of a vector, as adapters are packed."""
        return int(self._functions.pg_lora_width())

    def pack_lora(
        self,
        down: Tensor | None,  # A [rank, features]
        up: Tensor,  # B [n, rank], of the same dtype, float32 or bfloat16
        packed_down: int | None,  # the address of what is written, as PgLoraPart has both
        packed_up: int,
    ) -> None:
        """In any thread, also while a step is computed."""
        down, up = None if down is None else down.contiguous(), up.contiguous()
        address, features = (None, 0) if down is None else (down.data_ptr(), down.shape[1])
        stored = abi.PgLoraPart(address, up.data_ptr(), up.shape[1], len(up), 0.0)
        self._functions.pg_pack_lora(byref(stored), features, FORMATS[up.dtype], packed_down, packed_up)

    def lora(
        self,
        x: Tensor,  # [m, k] float32
        out: Tensor,  # [m, n] float32, added to
        adapters: Sequence[abi.PgLora | None],  # of each row
        *,
        round_rows: bool = False,  # to bfloat16, where the processor has dot products of it
    ) -> Tensor:
        check(x, torch.float32, (len(adapters), x.shape[1]))
        check(out, torch.float32, (len(adapters), out.shape[1]))
        table = (POINTER(abi.PgLora) * len(adapters))(*(_NONE if one is None else pointer(one) for one in adapters))
        self._call(self._functions.pg_lora, table, x.data_ptr(), *x.shape, out.shape[1], round_rows, out.data_ptr())
        return out

    def route(
        self,
        model: abi.PgModel,
        layer: abi.PgLayer,
        x: Tensor,  # [m, hidden] float32, after the norm
    ) -> tuple[Tensor, Tensor]:  # ids [m, top_k] int64 and weights [m, top_k] float32, by rank
        check(x, torch.float32, (len(x), model.hidden))
        shape = len(x), layer.experts.contents.top_k
        ids, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        addresses = x.data_ptr(), len(x), ids.data_ptr(), weights.data_ptr()
        self._call(self._functions.pg_route, byref(model), byref(layer), *addresses)
        return ids, weights


def _sampling(sampled: SampledColumns | None) -> abi.PgSampling:
    """Points into the columns."""
    if sampled is None:
        return abi.PgSampling()
    each = (sampled.temperature, sampled.seeds, sampled.top_k, sampled.depth, sampled.top_p)
    return abi.PgSampling(*(column.ctypes.data for column in each))
