"""The rows' block tables where graphs read them.  Changes are staged on the host and written by one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.ops.steps.transfer import to_device

WriteRows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


class DeviceTables:
    """Equal to the host's after each flush, in all blocks that a row has."""

    def __init__(self, num_rows: int, width: int, device: torch.device, write_rows: WriteRows) -> None:
        self.table: Tensor = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._write_rows = write_rows
        self._rows: list[int] = []
        self._begins: list[int] = []
        self._counts: list[int] = []
        self._values: list[int] = []

    def stage(self, row: int, begin: int, block_ids: Sequence[int]) -> None:
        """What the row's table has from column `begin` on."""
        self._rows.append(row)
        self._begins.append(begin)
        self._counts.append(len(block_ids))
        self._values += block_ids

    def flush(self) -> None:
        """Everything in one copy, in one launch, behind the steps that are under way."""
        if not self._rows:
            return
        starts = np.cumsum([0, *self._counts])
        columns = [np.array(column) for column in (self._rows, self._begins, starts, self._values)]
        packed = to_device(np.concatenate(columns).astype(np.int32), self.table.device)
        rows, begins, bounds, values = torch.split(packed, [len(column) for column in columns])
        self._write_rows(self.table, rows, begins, bounds, values)
        for staged in (self._rows, self._begins, self._counts, self._values):
            staged.clear()
