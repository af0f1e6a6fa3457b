"""What a worker has room for."""

from __future__ import annotations

import pytest

from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from tests.unit.scheduler.worlds.world import World


def running(num_blocks: int, sliding: tuple[tuple[int, int], ...] = ()) -> tuple[Replica, Sequence]:
    """A worker and a sequence that holds three blocks of each pool."""
    world = World(num_blocks=num_blocks, block_size=8, max_num_seqs=2, sliding=sliding)
    world.add("r", [index % 50 for index in range(20)], max_tokens=30)
    world.plan("w0")
    replica = world.scheduler.replicas["w0"]
    return replica, replica.running[0]


@pytest.mark.parametrize("sliding", [(), ((16, 8),)])
def test_what_lacks_no_block_goes_on_whatever_is_kept_for_others(sliding: tuple[tuple[int, int], ...]) -> None:
    replica, sequence = running(8, sliding)
    assert replica.num_missing(sequence, 24) == [0] * len(replica.pools)
    assert replica.can_grow(sequence, replica.num_missing(sequence, 24), reserve=6)
    missing = replica.num_missing(sequence, 40)
    assert missing == [2] * len(replica.pools)
    assert replica.can_grow(sequence, missing, reserve=3) and not replica.can_grow(sequence, missing, reserve=4)
    few = [1] * len(replica.pools)
    few[-1] = -1
    assert replica.can_grow(sequence, few, reserve=6) is (not sliding)


def test_each_pool_must_have_what_is_missing_there() -> None:
    replica, sequence = running(8, ((16, 6),))
    assert replica.can_grow(sequence, [3, 3]) and not replica.can_grow(sequence, [3, 4])
    assert not replica.can_grow(sequence, [6, 2]) and replica.can_grow(sequence, [5, 0])
    assert replica.room_in_windows(sequence, 20) == 48 - 20
    assert replica.room_in_windows(sequence, 20, reserve=1) == 40 - 20
    assert replica.room_in_windows(sequence, 20, reserve=6) == 1, "one at least"
