"""Adapters as the native library reads them: of each a structure for every linear that it may change."""

from __future__ import annotations

import ctypes

from engine.lora.adapter import SLOTS, LoraAdapter
from engine.weights.pages import Arena, padded
from kernels.cpu.binding import abi
from kernels.cpu.binding.lora import NOTHING, PackedLora, pack_embedding, pack_lora, packed_size, padded_columns
from kernels.cpu.binding.native import Native


class NativeAdapters:
    """The table that `PgModel.adapters` points at.  A place is written only while no step names it.

    A place keeps its memory for the adapter that comes next: pages that the kernel gives anew cost more than what is
    written to them, above all in a virtual machine whose host gives them back as soon.
    """

    def __init__(self, count: int, native: Native) -> None:
        self.table = (ctypes.POINTER(abi.PgLora) * count)()
        self._native = native
        self._held: dict[int, tuple[ctypes.Array[abi.PgLora], list[PackedLora]]] = {}
        self._memory: dict[int, Arena] = {}

    def hold(self, place: int, adapter: LoraAdapter) -> None:
        """In one stretch, in the order in which a step reads it."""
        head = () if adapter.head is None else (padded_columns(adapter.head),)
        layered = [slots.get(slot, ()) for slots in adapter.layers for slot in SLOTS]
        parts = [part for own in (*layered, head) for part in own]
        memory = self._memory_of(place, sum(padded(packed_size(part, adapter.dtype)) for part in parts))
        packed = [pack_lora(own, self._native, adapter.dtype, memory.take) for own in (*layered, head)]
        embedding = adapter.embedding
        packed.append(NOTHING if embedding is None else pack_embedding(embedding, self._native, adapter.dtype))
        structs = (abi.PgLora * len(packed))(*(one.struct for one in packed))
        self._held[place] = structs, packed
        self.table[place] = ctypes.cast(structs, ctypes.POINTER(abi.PgLora))

    def _memory_of(self, place: int, size: int) -> Arena:
        """Its own, unless that is too small, or more than twice as large."""
        memory = self._memory.get(place)
        if memory is None or not size <= memory.size <= 2 * size:
            memory = self._memory[place] = Arena(size)
        memory.clear()
        return memory

    def drop(self, place: int) -> None:
        self.table[place] = ctypes.POINTER(abi.PgLora)()
        del self._held[place]
