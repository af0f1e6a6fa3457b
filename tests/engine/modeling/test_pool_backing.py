"""Pages of a pool are there before a step writes to them, and not all of them."""

import mmap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.modeling import pool_backing as backing
from engine.modeling.pool_backing import IdleTime, PageBacking
from engine.weights.pages import Arena

NUM_BLOCKS, BYTES = 1024, 1 << 16  # of a block in one of two tensors: 128 MiB in all


def resident(tensors: list[torch.Tensor]) -> int:
    """Bytes of tensors that lie one after another that have memory.

    By page, since a mapping in smaps may have grown together with others of this process.
    """
    begin, end = tensors[0].data_ptr(), tensors[-1].data_ptr() + tensors[-1].nbytes
    first, last = begin // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first)), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE  # bit 63: present


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    arena = Arena(2 * NUM_BLOCKS * BYTES)
    return [arena.take(NUM_BLOCKS * BYTES).view(NUM_BLOCKS, BYTES) for _ in range(2)]


def test_blocks_ahead_of_the_highest_one_get_memory_and_later_ones_do_not(
    tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, slack = NUM_BLOCKS // 4, 8 << 20  # large pages at the ends
    monkeypatch.setattr(backing, "AHEAD", 2 * BYTES * ahead)
    one = PageBacking(tensors, NUM_BLOCKS, IdleTime())
    assert resident(tensors) < slack
    for used in (0, 1, ahead // 4 - 1, ahead // 4 + 1, 500):
        one.follow(used)
        one.wait()
        assert used + ahead * 3 // 4 <= one.num_backed <= used + ahead
    skipped = 500 - (ahead // 4 + 1 + ahead)  # in use before they were backed: not written to in this test
    assert abs(resident(tensors) - 2 * BYTES * (one.num_backed - skipped)) < slack
    one.follow(NUM_BLOCKS)
    one.wait()
    assert one.num_backed == NUM_BLOCKS
    assert all(not tensor.any() for tensor in tensors)


def test_a_quarter_of_a_large_pool_gets_memory(tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "AHEAD", 2 * BYTES)
    one = PageBacking(tensors, NUM_BLOCKS, IdleTime())
    one.follow(0)
    one.wait()
    assert one.num_backed == NUM_BLOCKS // backing.SHARE


def test_nothing_is_done_while_a_step_computes(tensors: list[torch.Tensor]) -> None:
    idle = IdleTime()
    idle.pause()
    one = PageBacking(tensors, NUM_BLOCKS, idle)
    one.follow(0)
    time.sleep(2 * backing.LOOK_EVERY)
    before = resident(tensors)
    idle.go_on()
    one.wait()
    assert before < 8 << 20 < resident(tensors)


def test_a_small_pool_starts_no_thread() -> None:
    one = PageBacking([torch.zeros(64, 1 << 10, dtype=torch.uint8)], 64, IdleTime())
    one.follow(0)
    assert one.num_backed == 64


def test_a_system_that_does_not_know_the_wish_is_no_error(
    tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backing, "POPULATE_WRITE", 12345)
    one = PageBacking(tensors, NUM_BLOCKS, IdleTime())
    one.follow(0)
    one.wait()
    assert resident(tensors) < 8 << 20
