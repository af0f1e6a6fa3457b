"""Block tables where graphs read them: equal to the host's after each flush."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from engine.execution.tables.device_tables import DeviceTables
from engine.execution.tables.rows import RowTable

CPU = torch.device("cpu")


class Launches:
    """What the kernel does, row by row; counts how often it is launched."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, table: Tensor, rows: Tensor, begins: Tensor, bounds: Tensor, values: Tensor) -> None:
        self.count += 1
        assert {one.dtype for one in (rows, begins, bounds, values)} == {torch.int32}
        assert len(rows) == len(begins) == len(bounds) - 1 and int(bounds[-1]) == len(values)
        for place, (row, begin) in enumerate(zip(rows.tolist(), begins.tolist(), strict=True)):
            new = values[int(bounds[place]) : int(bounds[place + 1])]
            table[row, begin : begin + len(new)] = new


def test_everything_staged_is_written_by_one_launch() -> None:
    launches = Launches()
    tables = DeviceTables(3, 6, CPU, launches)
    tables.flush()
    assert launches.count == 0, "there is nothing to write"
    tables.stage(2, 0, [5, 6, 7])
    tables.stage(0, 1, [9])
    tables.stage(2, 3, [8])
    assert not tables.table.any()
    tables.flush()
    assert launches.count == 1
    assert tables.table.tolist() == [[0, 9, 0, 0, 0, 0], [0] * 6, [5, 6, 7, 8, 0, 0]]
    tables.flush()
    assert launches.count == 1, "once"


def test_a_row_table_keeps_both_alike() -> None:
    r, launches = random.Random(1), Launches()
    device = DeviceTables(4, 4, CPU, launches)
    table = RowTable(
        num_rows=4, max_model_len=32, block_size=8, num_blocks=99, vocab_size=9, device=CPU, device_tables=device
    )
    for _ in range(30):
        rows = r.sample(range(4), 2)
        table.release([row for row in rows if r.random() < 0.5 or table.num_blocks[row] > 2])
        counts = [r.randrange(3) if table.num_blocks[row] < 3 else 0 for row in rows]
        table.append_blocks(rows, counts, [r.randrange(99) for _ in range(sum(counts))])
        table.flush()
        for row in range(4):
            held = int(table.num_blocks[row])
            assert device.table[row, :held].tolist() == table.block_tables[row, :held].tolist()
    assert launches.count > 5
