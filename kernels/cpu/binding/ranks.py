"""Groups of ranks, which compute one model together over memory that they share (native/ranks/group.h)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.binding import abi
from kernels.cpu.binding.packing import Packing

WHY_ENDED = {
    abi.LEFT: "it was asked to leave",
    abi.DISAGREED: "its ranks read different steps",
    abi.NO_ROOM: "a step is larger than its memory",
    abi.RANK_DIED: "a rank has ended",
    abi.RANK_SILENT: "a rank is silent",
}


class ExpertMove(NamedTuple):
    """An expert that the rank `target` gets, in the place of one that it has."""

    expert: int
    source: int  # a rank that has it
    dropped: int
    target: int


def why_ended(state: int) -> str:
    """Empty while a group lives."""
    return WHY_ENDED.get(state, f"of reason {state}") if state != abi.ALIVE else ""


class RankCalls(Packing):
    """What a rank asks the library for.  Once a group has ended, nothing that was computed means anything."""

    def expert_bytes(self, model: abi.PgModel) -> int:
        """Of what ranks share between the linears of a mixture's experts, by a model's dimensions."""
        return int(self._functions.pg_expert_bytes(byref(model)))

    def slot_bytes(self, model: abi.PgModel) -> int:
        """Of what whole experts of several ranks give."""
        return int(self._functions.pg_slot_bytes(byref(model)))

    def group_bytes(self, group: abi.PgGroup, hidden: int) -> int:
        """Of the memory that its ranks share."""
        return int(self._functions.pg_group_bytes(byref(group), hidden))

    def why_ended(self, group: abi.PgGroup) -> str:
        """Empty while the group lives."""
        return why_ended(self._functions.pg_group_state(byref(group)))

    def end_group(self, group: abi.PgGroup, reason: int = abi.LEFT) -> None:
        """From any thread, also while another one waits for a rank: it goes on at once."""
        self._functions.pg_group_end(byref(group), reason)

    def follow(self, model: abi.PgModel) -> None:
        """Compute what the leader orders, until the group ends."""
        self._answer(self._functions.pg_follow, byref(model))

    def group_logits(self, model: abi.PgModel) -> int:
        """The address of the logits that all ranks share."""
        return int(self._functions.pg_group_logits(byref(model)))

    def copy_group_blocks(self, model: abi.PgModel, pool: int, copies: Sequence[tuple[int, int]]) -> None:
        """In all ranks: (source, destination) blocks of the pool that begins at column `pool` of the tables."""
        pairs = np.array(copies, np.int64)
        self._call(self._functions.pg_group_copy, byref(model), pool, pairs.ctypes.data, len(pairs))

    def move_experts(self, model: abi.PgModel, layer: int, moves: Sequence[ExpertMove]) -> None:
        """Of one layer, in all ranks, between two steps."""
        structs = (abi.PgExpertMove * len(moves))(*(abi.PgExpertMove(*one) for one in moves))
        self._call(self._functions.pg_group_move, byref(model), layer, structs, len(moves))

    def gather(self, group: abi.PgGroup, hidden: int, num_bytes: int, rounds: int) -> NDArray[np.int64]:  # [rounds]
        """Nanoseconds of as many gathers of so many bytes of each rank; all ranks call this, beside no step."""
        own, times = np.zeros(num_bytes, np.uint8), np.zeros(rounds, np.int64)
        arguments = own.ctypes.data, num_bytes, rounds, times.ctypes.data
        self._call(self._functions.pg_gather, byref(group), hidden, *arguments)
        return times
