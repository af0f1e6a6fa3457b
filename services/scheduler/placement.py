"""Which worker a sequence waits at: the one where the least is left to do before it is done."""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.replica import Replica
from services.scheduler.sequence import Sequence


def place(sequence: Sequence, replicas: Mapping[str, Replica], use_cache: bool) -> Replica | None:
    """The worker of the first sibling if it has one, else the cheapest; None where no worker takes requests."""
    sibling = replicas.get(sequence.parent.worker)
    if sequence.index and sibling is not None:
        return sibling
    candidates = [replica for replica in replicas.values() if not replica.is_draining]
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda replica: cost(sequence, replica, use_cache), default=None)


def cost(sequence: Sequence, replica: Replica, use_cache: bool) -> tuple[int, str]:
    """Tokens in hand there plus tokens of this one that its cache does not have; the name breaks ties."""
    hits = 0
    if use_cache:
        hits = len(replica.pool.lookup(sequence.hash_blocks(replica.block_size))) * replica.block_size
    return replica.load - hits, replica.instance
