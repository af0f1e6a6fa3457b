"""What the prefix cache has of the sequences of a step, and what the step adds to it."""

from __future__ import annotations

from itertools import islice

from services.scheduler.blocks.sliding import PrefixHit
from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from services.scheduler.state.step import Step
from shared.tracing.phases import Miss

MAX_PREFETCHED = 2  # sequences that wait, for which blocks are fetched before their turn


class Prefixes:
    """The cache of one worker, as one step sees it.

    Of many that arrive at once with one prefix, the first computes it alone and the others follow a step behind: so
    the blocks that the step computes are known by name before they can be found.
    """

    def __init__(self, replica: Replica, builder: PlanBuilder, policy: Policy) -> None:
        self._replica = replica
        self._builder = builder
        self._is_enabled = policy.enable_prefix_caching
        self._filling: set[bytes] = set()  # names of blocks
        self._marks: dict[Sequence, int] = {}  # tokens behind which a snapshot of a state is to be taken
        self._saving: set[bytes] = set()  # names of these snapshots

    # -- what it has

    def hit(self, sequence: Sequence) -> PrefixHit:
        """Cached blocks of the longest prefix; at least one token is left to compute, for its logits."""
        return self._replica.find(self.usable_hashes(sequence))

    def num_usable(self, sequence: Sequence) -> int:
        """Blocks that could be hits: not that of the last token."""
        return (sequence.num_tokens - 1) // self._replica.block_size

    def refusal(self, sequence: Sequence) -> Miss | None:
        """Why the cache is not asked for a sequence."""
        if not self._is_enabled:
            return Miss.OFF
        return Miss.NOT_ASKED if sequence.needs_all_states else None

    def usable_hashes(self, sequence: Sequence) -> list[bytes]:
        if self.refusal(sequence) is not None:
            return []
        return sequence.hash_blocks(self._replica.block_size)[: self.num_usable(sequence)]

    def num_known(self, names: list[bytes], first: int) -> int:
        """How many blocks of these names are cached, or are by the end of this step, from place `first` on."""
        knows, filling = self._replica.pool.knows, self._filling
        return next((i for i in range(first, len(names)) if not (knows(names[i]) or names[i] in filling)), len(names))

    # -- what the step adds

    def clear(self) -> None:
        """Forget the step that was made or given up."""
        self._marks.clear()

    def mark(self, sequence: Sequence, end: int) -> None:
        """A snapshot of its state is to be taken behind so many tokens, if the step ends there."""
        self._marks[sequence] = end

    def marked(self, step: Step) -> list[tuple[Sequence, bytes]]:
        """The snapshots that a step takes, with their names."""
        columns = zip(step.sequences, step.num_computed, step.num_scheduled, strict=True)
        ends = ((sequence, computed + scheduled) for sequence, computed, scheduled in columns)
        size = self._replica.block_size
        return [(s, s.hash_blocks(size)[end // size - 1]) for s, end in ends if self._marks.get(s) == end]

    def look(self) -> None:
        """Note the prompt blocks that the step computes so far."""
        step = self._builder.step
        self._filling.clear()
        for sequence, num_tokens in zip(step.sequences, step.num_scheduled, strict=True):
            if num_tokens > 1:
                self.fill(sequence, num_tokens)
        self._saving.clear()
        self._saving.update(name for _, name in self.marked(step))

    def fill(self, sequence: Sequence, num_tokens: int) -> None:
        """Note the blocks that the step will have filled with so many tokens of this sequence."""
        if self._is_enabled:
            size, num_computed = self._replica.block_size, sequence.num_computed_tokens
            names = sequence.hash_blocks(size)
            self._filling.update(names[num_computed // size : (num_computed + num_tokens) // size])
            if self._marks.get(sequence) == num_computed + num_tokens:
                self._saving.add(names[(num_computed + num_tokens) // size - 1])

    def is_being_filled(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether the step computes for another the block that this sequence, with so many hits, would have to compute
        first; where states are kept, whether the step takes a snapshot that would be a longer hit."""
        hashes = self.usable_hashes(sequence)
        if self._replica.snapshots is not None:
            return not self._saving.isdisjoint(hashes[num_hits:])
        return num_hits < len(hashes) and hashes[num_hits] in self._filling

    def is_coming(self, sequence: Sequence, found: list[int], reserve: int) -> bool:
        """Whether more of the sequence than was found is there soon: the step computes it for another, or it is fetched
        from a store, for which `reserve` blocks are left alone."""
        if self.is_being_filled(sequence, len(found)):
            return True
        return bool(self._replica.moves.space) and self._awaits(sequence, found, reserve)

    def _awaits(self, sequence: Sequence, found: list[int], reserve: int) -> bool:
        names = self.usable_hashes(sequence)
        is_coming = self._replica.moves.awaits(names, found, reserve)
        if is_coming and self._replica.pool.events is not None:
            self._replica.learn(sequence, range(len(found), len(names)))
        return is_coming

    def prefetch(self, reserve: int) -> None:
        """Begin to fetch for one of the first that still wait, as for a row: what comes is cached when its turn is."""
        for sequence in islice(self._replica.waiting, MAX_PREFETCHED):
            if self._awaits(sequence, self._replica.pool.lookup(self.usable_hashes(sequence)), reserve):
                return

    def register(self, step: Step) -> None:
        """Make the blocks findable that a committed step fills with known tokens: plans are executed in order, so
        a sequence that finds one reads it after it was written."""
        if not self._is_enabled:
            return
        size = self._replica.block_size
        for sequence in step.sequences:
            if sequence.num_computed_tokens // size > sequence.num_registered_blocks:
                self._replica.register_full(sequence)
