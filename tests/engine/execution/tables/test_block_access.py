"""Blocks as bytes: read and written where the fence agrees, and of which pools there are any."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.execution.tables.block_access import BlockAccess, access_to, space_of
from engine.execution.tables.block_fence import PoolFence
from engine.modeling.kv_pool import KVPool
from shared.messages.fingerprint import Fingerprint

BLOCKS, SIZE = 5, 4
BYTES = SIZE * 2 * 4 + SIZE  # of a block: float32 pairs and one byte for each token


def tensors() -> list[torch.Tensor]:
    count = BLOCKS * SIZE
    pairs = torch.arange(2 * count, dtype=torch.float32).view(BLOCKS, SIZE, 2)
    return [pairs, torch.arange(100, 100 + count, dtype=torch.uint8).view(BLOCKS, SIZE)]


class World:
    """Blocks 1 to 3 were claimed in generations 11 to 13."""

    def __init__(self) -> None:
        self.tensors = tensors()
        self.fence = PoolFence(2, BLOCKS, SIZE)
        self.access = BlockAccess(KVPool(BLOCKS, SIZE, self.tensors), self.fence, Fingerprint())
        assert self.access.claim([1, 2, 3], [11, 12, 13]) == 3

    def bytes_of(self, block: int) -> list[int]:
        parts = [one[block].reshape(-1).view(torch.uint8) for one in self.tensors]
        return [byte for part in parts for byte in part.tolist()]


def test_a_block_s_bytes_are_those_of_all_tensors() -> None:
    world = World()
    assert world.access.block_bytes == BYTES
    found = world.access.read([3, 1], [13, 11])
    assert found.dtype == np.uint8 and found.tolist() == [world.bytes_of(3), world.bytes_of(1)]


def test_blocks_are_read_up_to_one_of_another_generation() -> None:
    world = World()
    for blocks, generations, count in (([2, 1, 3], [12, 10, 13], 1), ([1], [12], 0), ([], [], 0)):
        assert world.access.num_agreeing(blocks, generations) == count
        found = world.access.read(blocks, generations)
        assert found.shape == (count, BYTES) and found.tolist() == [world.bytes_of(one) for one in blocks[:count]]


def test_what_a_plan_changes_during_a_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    answers = iter([3, 1])
    monkeypatch.setattr(world.fence, "num_agreeing", lambda blocks, generations: next(answers))
    assert world.access.read([1, 2, 3], [11, 12, 13]).tolist() == [world.bytes_of(1)]


def test_blocks_are_written_up_to_one_that_was_given_to_a_row_since() -> None:
    world = World()
    before = [world.bytes_of(block) for block in range(BLOCKS)]
    world.access.claim([2], [14])
    data = np.arange(3 * BYTES, dtype=np.uint8).reshape(3, BYTES)
    assert world.access.write([3, 2, 1], [13, 12, 11], data) == 1
    assert world.bytes_of(3) == data[0].tolist()
    assert [world.bytes_of(block) for block in (0, 1, 2, 4)] == [before[block] for block in (0, 1, 2, 4)]


def test_a_pool_that_was_emptied_has_another_life() -> None:
    world = World()
    before = world.access.life
    world.fence.reset()
    assert world.access.life != before and world.access.num_agreeing([1], [11]) == 0


def test_only_whole_blocks_on_a_cpu_are_lent() -> None:
    fence, fingerprint = PoolFence(2, BLOCKS, SIZE), Fingerprint()

    def pool(held: list[torch.Tensor], *sliding: KVPool) -> KVPool:
        return KVPool(BLOCKS, SIZE, held, sliding)

    whole = pool(tensors())
    assert isinstance(access_to(whole, fence, fingerprint), BlockAccess)
    assert access_to(whole, fence, None) is None
    assert access_to(pool(tensors(), pool([])), fence, fingerprint) is None
    assert access_to(pool([]), fence, fingerprint) is None
    strided, elsewhere = torch.zeros(BLOCKS, 2, SIZE).transpose(1, 2), torch.zeros(BLOCKS, SIZE, device="meta")
    for other in (strided, elsewhere):
        assert access_to(pool([*tensors(), other]), fence, fingerprint) is None
    part: Any = pool(tensors())
    part.is_part = True
    assert access_to(part, fence, fingerprint) is None


def test_workers_share_blocks_where_all_that_makes_their_bytes_is_equal() -> None:
    def space(
        fingerprint: Fingerprint, num_blocks: int = BLOCKS, size: int = SIZE, shape: tuple[int, ...] = (3, 2),
        dtype: torch.dtype = torch.float32,
    ) -> bytes:  # fmt: skip
        return space_of(KVPool(num_blocks, size, [torch.zeros(num_blocks, *shape, dtype=dtype)]), fingerprint)

    one = Fingerprint()
    assert space(one) == space(Fingerprint()) == space(one, num_blocks=9)
    text, other = msgspec.structs.replace(one, tokenizer="b"), msgspec.structs.replace(one, weights="b")
    assert space(text) == space(one), "a block's name says its tokens"
    others = {space(other), space(one, size=8), space(one, dtype=torch.int32)}
    others |= {space(one, shape=shape) for shape in ((3, 3), (4, 2), (6,))}
    assert len(others) == 6 and space(one) not in others
