"""Why a prefix cache did not have a prompt: each token that was no hit, by reason.

Names of blocks are salted, so that another tenant's cannot be found by them.  Fingerprints without a salt show that the
same tokens are known under another one; they never leave the scheduler, and clients do not learn of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.name_times import NameTimes
from services.scheduler.state.clocks import SequenceClock
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from shared.tracing.phases import NUM_MISSES, Miss

MAX_FINGERPRINTS = 1 << 15  # of prefixes that were seen ...
PER_BLOCK = 2  # ... and for each block that there is: what no cache could hold any more needs no reason
MAX_LOST = 1 << 15  # names of blocks of workers that are gone


class PrefixMissDiagnostics:
    """Knows what was seen lately, everywhere in the deployment."""

    def __init__(self, replicas: Mapping[str, Replica], clock: Clock) -> None:
        self._replicas = replicas
        self._clock = clock
        self._lost = NameTimes(MAX_LOST)
        self._seen: OrderedDict[int, bytes] = OrderedDict()  # fingerprint -> root of its last request; oldest first

    def lose(self, replica: Replica) -> None:
        """A worker is gone, and its cache with it."""
        self._lost.note_all(replica.pool.names, self._clock.now)

    def explain(
        self, sequence: Sequence, clock: SequenceClock, replica: Replica, num_usable: int, refusal: Miss | None
    ) -> None:
        """Note on its clock why what is not cached of a sequence's prompt is not.

        The cache was asked for `num_usable` blocks; `refusal` says why it was not asked at all.  A sequence that is
        admitted with its sibling's prompt lacks only what no cache could hold.
        """
        counts = [0] * (Miss.NO_STATE if replica.snapshots is None else NUM_MISSES)
        size = replica.block_size
        num_prompt, num_cached = sequence.request.num_prompt_tokens, sequence.num_cached_tokens
        if refusal is not None and not num_cached:
            counts[refusal] = num_prompt
        else:
            num_full = max(min(num_usable, num_prompt // size), num_cached // size)
            counts[Miss.BELOW_BLOCK] = num_prompt - max(num_full * size, num_cached)
            num_over = num_cached % size  # of the first block that is not cached whole
            for reason, name in self._reasons(sequence, replica, num_cached // size, num_full):
                counts[reason] += size - num_over
                num_over = 0
                if reason is Miss.EVICTED and clock.evicted_ago < 0:
                    clock.evicted_ago = self._age(replica, name)
        clock.misses = counts

    def _age(self, replica: Replica, name: bytes) -> int:
        """Milliseconds since a block was evicted, of the first pool that lacks it."""
        times = (pool.evicted.get(name) for pool in replica.pools if not pool.knows(name))
        return max(0, round(1000 * (self._clock.now - next((time for time in times if time is not None), 0.0))))

    def _reasons(self, sequence: Sequence, replica: Replica, first: int, end: int) -> Iterator[tuple[Miss, bytes]]:
        """Of the blocks `first` to `end`, with their names.  What follows on one that was never seen was not either;
        what is cached here, but behind one that is not, cannot be reached for that one's reason."""
        prints = fingerprints(sequence.request.prompt_token_ids, replica.block_size)
        most = min(MAX_FINGERPRINTS, PER_BLOCK * sum(other.pool.size for other in self._replicas.values()))
        names, reason = sequence.hash_blocks(replica.block_size) if first < end else [], Miss.NEVER_SEEN
        for index, fingerprint in enumerate(prints):
            if first <= index < end and (index == first or reason is not Miss.NEVER_SEEN):
                reason = self._reason(names[index], fingerprint, sequence.request.root, replica) or reason
            self._seen[fingerprint] = sequence.request.root
            while len(self._seen) > most:
                self._seen.popitem(last=False)
            if first <= index < end:
                yield reason, names[index]

    def _reason(self, name: bytes, fingerprint: int, root: bytes, replica: Replica) -> Miss | None:
        """None where the block is cached here, and that is all that there is to cache."""
        evicted = any(not pool.knows(name) and pool.evicted.get(name) is not None for pool in replica.pools)
        if replica.pool.knows(name) and not evicted:
            return None if replica.snapshots is None else Miss.NO_STATE
        if evicted:
            return Miss.EVICTED
        if any(other.pool.knows(name) for other in self._replicas.values() if other is not replica):
            return Miss.OTHER_WORKER
        if self._lost.get(name) is not None:
            return Miss.WORKER_LOST
        return Miss.NEVER_SEEN if self._seen.get(fingerprint, root) == root else Miss.SALT


def fingerprints(token_ids: list[int], block_size: int) -> Iterator[int]:
    """Of every prefix of full blocks, a number: good enough to find a reason, and a quarter of a name's cost."""
    fingerprint = 0
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        fingerprint = hash((fingerprint, *token_ids[start : start + block_size]))
        yield fingerprint
