"""What ranks that compute with torch bring together while they compute a step, by a backend of torch.distributed.

Gathers put features beside each other, so no sum crosses ranks.  `add` sums in an order that the backend chooses.
Every call is collective: all ranks make the same calls in the same order.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.description.ranks import Place
from kernels.cpu.binding import abi
from kernels.cpu.binding.ranks import why_ended
from shared.errors import FatalError

LOOK = timedelta(seconds=0.1)  # between two looks at whether the group has ended, while a CPU waits for other ranks


class CollectiveBackend(Protocol):
    """What is used of torch's ProcessGroupGloo or ProcessGroupNCCL, as they call it."""

    def name(self) -> str: ...

    def _allgather_base(self, whole: Tensor, own: Tensor) -> dist.Work: ...

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work: ...

    def gather(self, wholes: list[list[Tensor]], own: list[Tensor], options: Any) -> dist.Work: ...

    def abort(self) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...


class Collectives:
    """One rank's.  Before they are connected nothing passes, and what others would give is zero: for profiles.

    Once the group has ended, every call raises FatalError; one that waits does so within LOOK.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.pass_turn: Callable[[], None] = lambda: None  # called while what was begun is on its way
        self._backend: CollectiveBackend | None = None
        self._ended = abi.ALIVE
        self._ending = threading.Lock()

    def connect(self, backend: CollectiveBackend) -> None:
        """With the backend of a group in which this rank has its number."""
        self._backend = backend

    def gather(
        self,
        own: Tensor,  # [num_rows, widths[rank]]
        widths: Sequence[int],  # features of each rank
    ) -> Tensor:  # [num_rows, sum of widths]
        whole = own.new_zeros(self.place.ranks * len(own), max(widths))
        sent = _widened(own, max(widths))
        self._finish(lambda backend: backend._allgather_base(whole, sent))
        parts = whole.view(self.place.ranks, len(own), -1)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def add(
        self,
        partial: Tensor,  # [num_rows, features], of the same shape at all ranks; changed
    ) -> Tensor:  # [num_rows, features]: the sum
        self._finish(lambda backend: backend.allreduce([partial]))
        return partial

    def from_leader(
        self,
        rows: Tensor,  # of the same shape at all ranks; changed where this rank does not lead
    ) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._finish(lambda backend: backend.broadcast([rows], options))
        return rows

    def to_leader(
        self,
        own: Tensor,  # [num_rows, widths[rank]]
        widths: Sequence[int],  # features of each rank
    ) -> Tensor | None:  # [num_rows, sum of widths]; None where this rank does not lead
        leads = self.place.leads
        sent = _widened(own, max(widths))
        parts = [torch.zeros_like(sent) for _ in widths] if leads else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._finish(lambda backend: backend.gather([parts] if leads else [], [sent], options))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1) if leads else None

    def end(self, reason: int) -> None:
        """From any thread; the first reason stays."""
        with self._ending:
            if self._ended != abi.ALIVE:
                return
            self._ended = reason
        backend = self._backend
        if backend is None or reason == abi.LEFT:
            return
        # Never destroyed: its destructor would wait for what a frozen rank owes, and this process could not end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
        if backend.name() == "nccl":  # what is in flight on the GPU would never end
            backend.abort()

    @property
    def why_ended(self) -> str:
        """Empty while the group lives."""
        return why_ended(self._ended)

    def check(self) -> None:
        if why := self.why_ended:
            raise FatalError(f"the group of ranks has ended: {why}")

    def _finish(self, begin: Callable[[CollectiveBackend], dist.Work]) -> None:
        if self._backend is None:
            return
        self.check()
        try:
            work = begin(self._backend)
            self.pass_turn()
            if self._backend.name() == "nccl":
                work.wait()  # the stream waits, not this thread
            else:
                self._wait(work)
        except RuntimeError as error:
            self.end(abi.RANK_DIED)
            raise FatalError(f"the group of ranks has ended: {self.why_ended}") from error
        self.check()

    def _wait(self, work: dist.Work) -> None:
        """Raises RuntimeError where a rank is gone, and FatalError once the group has ended."""
        while True:
            try:
                work.wait(LOOK)
            except RuntimeError:
                if work.is_completed():
                    raise
                self.check()
            else:
                return


def _widened(
    own: Tensor,  # [num_rows, width]
    width: int,
) -> Tensor:  # [num_rows, width], contiguous: backends exchange parts of one size
    return torch.nn.functional.pad(own, (0, width - own.shape[1])).contiguous()
