"""Steps as graphs: what a decode or verification launches is captured once for some sizes, and then replayed.

A graph reads and writes memory that stays where it is, so each size has tensors of its own for what a step brings:
rows, lengths, tiles.  A step is padded to the next size: a token of padding stores no keys, and its result is
not read.  Graphs of all sizes share one pool of memory, because they run one after the other on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.description.spec import ModelSpec
from engine.modeling.batch import StepBatch
from engine.modeling.kv_pool import KVPool, Sliding
from engine.modeling.torch_decoder.decoder import Decoder
from engine.modeling.torch_decoder.inputs import PoolInputs, StepInputs
from kernels.ops.attention.attention import StaticPlan
from kernels.ops.steps.transfer import to_device

Replay = Callable[[], Tensor]  # -> [num_tokens, hidden_size], overwritten by the next replay of any graph
FINE, COARSE = 8, 16  # sizes: powers of 2 up to the one, then steps of it up to the other, and of that beyond


class Recorder(Protocol):
    """What turns launches into something that can be run again."""

    def record(self, run: Replay) -> Replay: ...


class DirectRecorder:
    """Runs the launches themselves again: where there are no graphs, and to compare with those that there are."""

    def record(self, run: Replay) -> Replay:
        return run


class CudaRecorder:
    """CUDA graphs (HIP's, where torch is built for it) over one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Replay) -> Replay:
        make: Callable[[], Any] = torch.cuda.Stream
        stream = make()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries make handles and workspaces at first use, not within a capture
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = run()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay


@dataclass(frozen=True, order=True, slots=True)
class Size:
    """What one graph is for."""

    num_tokens: int
    longest: int  # tokens of an entry
    cuts: bool  # contexts may be longer than attention takes in one piece


class StepGraph:
    """One size's tensors, and the launches that read them."""

    def __init__(
        self,
        decoder: Decoder,
        size: Size,
        plans: Sequence[StaticPlan],  # for the layers of each KV pool
        tokens: Tensor,  # [num_rows, longest] int64
        block_tables: Sequence[Tensor],  # of each pool [num_rows, max_num_blocks] int32
        block_size: int,
    ) -> None:
        self._plans = plans
        self._size = size
        device = tokens.device
        self._columns = torch.zeros(3, size.num_tokens + 1, dtype=torch.int32, device=device)
        rows, computed, starts = self._columns
        unused = torch.empty(0, dtype=torch.int64, device=device)

        def run() -> Tensor:
            found = [
                decoder.kernels.step_inputs(
                    tokens, tables, rows[:-1], computed[:-1], starts, block_size, size.num_tokens
                )
                for tables in block_tables
            ]
            pools = [PoolInputs(slots, plan.metadata) for (_, _, slots), plan in zip(found, plans, strict=True)]
            return decoder.compute(StepInputs(*found[0][:2], pools, unused))

        self.run: Replay = run

    def fill(self, batch: StepBatch) -> None:
        count, ends = len(batch.rows), np.cumsum(batch.scheduled)
        columns = np.zeros((3, self._size.num_tokens + 1), np.int32)
        columns[0, :count], columns[1, :count] = batch.rows, batch.computed
        columns[2, 1 : count + 1], columns[2, count + 1 :] = ends, ends[-1]
        self._columns.copy_(to_device(columns, self._columns.device), non_blocking=True)
        for plan in self._plans:
            plan.fill(batch.rows, batch.scheduled, batch.computed + batch.scheduled)


class GraphedDecoder:
    """A decoder whose small steps are replayed: a `engine.modeling.model.Model`.  Others run as they are."""

    def __init__(self, decoder: Decoder, recorder: Recorder, *, max_tokens: int, longest: int) -> None:
        """For steps of up to `max_tokens` tokens, `longest` of an entry: 1 + the most draft tokens."""
        self.spec: ModelSpec = decoder.spec
        self.device: torch.device = decoder.device
        # Nothing of these is replayed.
        self.layer_bytes, self.logits, self.greedy = decoder.layer_bytes, decoder.logits, decoder.greedy
        self.reserve_adapters, self.hold_adapter = decoder.reserve_adapters, decoder.hold_adapter
        self.drop_adapter = decoder.drop_adapter
        self._decoder = decoder
        self._recorder = recorder
        self.max_tokens = max_tokens
        self._buckets = step_sizes(max_tokens)
        self._lengths = (1,) if longest == 1 else (1, longest)
        self._graphs: dict[Size, tuple[StepGraph, Replay]] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = (), num_states: int = 0) -> KVPool:
        self._graphs.clear()  # they write to the pool that was
        return self._decoder.allocate(num_blocks, block_size, sliding, num_states)

    def capture(
        self,
        tokens: Tensor,  # [num_rows, max_model_len + 1] int64: the table that every step's batch names
        block_tables: Tensor,  # [num_rows, num_pools * max_num_blocks] int32
        block_size: int,
        *,
        progress: Callable[[Sequence[Size]], Iterable[Size]] = iter,
    ) -> None:
        """The largest first, so that the others fit into the memory that it took."""
        plan_static, split = self._decoder.kernels.static_attention, self._decoder.kernels.split
        assert plan_static is not None
        windows = self._decoder.windows
        tables = block_tables.chunk(len(windows), dim=1)
        longest_context = tables[0].shape[1] * block_size
        for size in progress(self._sizes(longest_context > split)):
            context = longest_context if size.cuts else min(split, longest_context)
            columns = zip(tables, windows, strict=True)
            plans = [plan_static(table, seen, size.num_tokens, size.longest, context) for table, seen in columns]
            graph = StepGraph(self._decoder, size, plans, tokens, tables, block_size)
            with torch.inference_mode():
                self._graphs[size] = graph, self._recorder.record(graph.run)

    def _sizes(self, cuts: bool) -> list[Size]:
        cut = (True, False) if cuts else (False,)
        sizes = [Size(bucket, length, c) for bucket in self._buckets for length in self._lengths for c in cut]
        return sorted(sizes, reverse=True)

    def forward(self, batch: StepBatch) -> Tensor:
        """Final hidden states [sum of wanted, hidden_size]; writes this step's keys and values into the pool."""
        size = self._size_of(batch)
        if size not in self._graphs:
            return self._decoder.forward(batch)
        graph, replay = self._graphs[size]
        graph.fill(batch)
        hidden = replay()
        if np.array_equal(batch.wanted, batch.scheduled):
            return hidden[: batch.num_wanted]
        return hidden[to_device(batch.wanted_places(), hidden.device)]

    def _size_of(self, batch: StepBatch) -> Size | None:
        if batch.adapters is not None:
            return None
        longest, total = int(batch.scheduled.max()), int(batch.scheduled.sum())
        bucket = next((size for size in self._buckets if size >= total), 0)
        length = next((length for length in self._lengths if length >= longest), 0)
        if not bucket or not length:
            return None
        return Size(bucket, length, int((batch.computed + batch.scheduled).max()) > self._decoder.kernels.split)


def step_sizes(largest: int) -> list[int]:
    """Numbers of tokens for which a step is captured, with little padding between them."""
    sizes = [1, 2, 4, *range(FINE, 8 * FINE, FINE), *range(8 * FINE, largest + 1, COARSE)]
    return [*(size for size in sizes if size < largest), largest]
