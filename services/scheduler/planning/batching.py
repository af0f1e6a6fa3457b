"""Plans a worker's steps: which sequences compute how many tokens, in which blocks."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.planning.adapter_room import AdapterRoom
from services.scheduler.planning.block_budget import BlockBudget
from services.scheduler.planning.block_starts import BlockStarts
from services.scheduler.planning.branching import branch_off, idle_beams, is_idle
from services.scheduler.planning.checkpoints import Checkpoints
from services.scheduler.planning.chunks import ChunkSizes
from services.scheduler.planning.fair_share import FairShareAdmission
from services.scheduler.planning.forking import awaits_sibling, can_fork, fork
from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.planning.preemption import Preemption
from services.scheduler.planning.prefixes import Prefixes
from services.scheduler.planning.quarantine import must_be_alone
from services.scheduler.planning.sharing import Claims, Visitors
from services.scheduler.speculation.drafting import Drafting
from services.scheduler.speculation.speculation import Speculation
from services.scheduler.state.forks import Forks
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence, Status
from services.scheduler.state.step import Step
from services.scheduler.telemetry.books import Books
from shared.messages import StepPlan
from shared.tracing.phases import Phase

Obstacle = tuple[Phase, Sequence | None]
NOTHING: Obstacle = (Phase.QUEUE_STEP, None)  # the queue was not looked at


class Batcher:
    """The planner of one replica, which lives as long as the replica does.

    Each step's token budget goes to decodes first, then to the sequences that go ahead of others for fairness, then to
    running prefills, then to the waiting sequences.

    Order within each is by rank.  Where blocks run out, the victim is the cheapest to recompute among those less
    urgent than the one in need, or else itself; so the most urgent always goes on, and every step makes progress.

    Background sequences have a part in steps in which no other could have one, and those steps are short, as the next
    request that is none has to wait for them.  Else they rest, and give way where another lacks a row or blocks.

    Invariant: between two plans it holds nothing of a step, so that it keeps no finished sequence alive.
    """

    def __init__(self, replica: Replica, policy: Policy, drafting: Drafting, forks: Forks, books: Books) -> None:
        self.replica = replica
        self.policy = policy
        self.drafting = drafting
        self.counters = books.counters
        self.journal = books.journal
        self.shares = books.shares
        self.misses = books.misses
        self.accounts = books.accounts
        self.clocks = books.accounts.workers[replica]
        self.forks = forks
        self.builder = PlanBuilder(replica, policy, forks.unsent)
        self._drafted: set[Sequence] = set()  # with drafts in this step, or in one in flight
        self._prefixes = Prefixes(replica, self.builder, policy)
        self._checkpoints = Checkpoints(replica, self._prefixes)
        self._block_budget = BlockBudget(replica, self._prefixes, policy.max_num_batched_tokens)
        self._starts = BlockStarts(replica, self.builder, self._prefixes, self._block_budget, policy)
        self._chunks = ChunkSizes(replica, self.builder, self._checkpoints, policy)
        self._preemption = Preemption(replica, self.builder, books)
        self._ahead = FairShareAdmission(replica, self._block_budget, self._preemption)
        self._visitors = Visitors(replica, books.shares)
        self._obstacle = NOTHING  # where the queue stopped, and why
        self._adapter_room = AdapterRoom(replica, self._preemption.take_adapter_from_resting)

    def next_plan(self) -> StepPlan | None:
        """The plan, counted as sent; None where no sequence can go on."""
        try:
            return self._plan()
        finally:
            self._clear()

    def _clear(self) -> None:
        self.builder.clear()
        self._prefixes.clear()
        self._drafted.clear()
        self._ahead.clear()
        self._chunks.clear()
        self._obstacle = NOTHING
        self._adapter_room.clear()

    def _plan(self) -> StepPlan | None:
        if self.policy.enable_chunked_prefill:
            self._chunks.slow = self._visitors.slow()
        if self.policy.enable_chunked_prefill and self.replica.is_in_background:
            self.builder.budget = min(self.builder.budget, self.policy.background_step_tokens)
        if self.forks:
            self._branch_off()
        if self.replica.is_shared:
            claims = Claims(self.replica, self.shares, slack=self.policy.max_num_batched_tokens)
            self._ahead.choose(claims, self.builder.budget - self.replica.num_active, self._may_start)
        self._note_drafted()
        if self.drafting.speculations:
            self._verify()
        growing, prefills = self._decode()
        for sequence in growing:
            if self.builder.budget > 0 and sequence.status is Status.RUNNING:
                self._go_on(sequence, 1, 1)
        self._admit_ahead()
        for sequence in prefills:
            num_behind, num_wanted = sequence.num_behind, self.replica.num_wanted(sequence)
            if sequence.status is not Status.RUNNING:
                continue
            if num_tokens := self._chunks.size(sequence, sequence.num_computed_tokens, num_wanted):
                if self.replica.sliding:
                    num_tokens = min(num_tokens, self.replica.room_in_windows(sequence, sequence.num_computed_tokens))
                self._go_on(sequence, num_tokens, int(num_tokens == num_behind))
        if self.builder.has_preempted:
            self._obstacle = (Phase.QUEUE_BLOCKS, None)
        else:
            self._admit_waiting()
        if self.replica.moves.can_prefetch:
            self._prefixes.prefetch(self._block_budget.reserve)
        if not (self.builder.step.sequences or self.replica.in_flight):
            self._make_idle_give_way()
        if self.replica.waiting or self.clocks:
            self.clocks.look(self.replica.waiting.firsts, *self._obstacle, self.accounts.clock.now)
        if self.policy.enable_chunked_prefill:
            self._visitors.planned()
        if not self.builder.step.sequences:
            return None
        self._checkpoints.take(self.builder.step)
        if self.drafting.speculations:
            self.builder.num_wanted_drafts = self.drafting.num_wanted(self.replica, self.builder.step)
        plan = self.builder.commit()
        self._count_chunks(self.builder.step)
        self._prefixes.register(self.builder.step)
        return plan

    # -- running sequences

    def _branch_off(self) -> None:
        """Start the beams that begin behind others; those that rest begin when they go on, as do the others."""
        branches = self.forks.take(self.replica)
        if self.replica.is_resting:
            for beam, source in branches:
                if beam.is_background:
                    self.forks.begin(self.replica, beam, source)
            branches = [(beam, source) for beam, source in branches if not beam.is_background]
            while self._block_budget.num_lacking_for(len(branches)) > 0 and self._preemption.take_from_resting():
                pass
        reserve = self._block_budget.reserve
        self.counters.num_block_copies += branch_off(self.replica, self.builder, branches, reserve)

    def _note_drafted(self) -> None:
        """How many tokens a step in flight yields for a sequence with drafts is not known: it gets no other."""
        for step in self.replica.in_flight:
            if step.num_drafts:
                parts = zip(step.sequences, step.drafts, strict=True)
                self._drafted.update(sequence for sequence, drafts in parts if drafts.token_ids)

    def _verify(self) -> None:
        """Give draft tokens to the sequences that were asked for: as many as fit, without preempting for them."""
        speculation = self.drafting.speculations.get(self.replica)
        if speculation is None or not speculation.has_asked:
            return
        self.builder.step.mode = speculation.mode
        for sequence in self.replica.active:
            if sequence.can_verify:
                drafts = self.drafting.usable(self.replica, sequence).first(self._num_drafts(sequence, speculation))
                num_tokens = 1 + len(drafts.token_ids)
                if num_tokens > 1 and (new_blocks := self._room_for(sequence, num_tokens)) is not None:
                    self.builder.schedule(sequence, num_tokens, 1, new_blocks, drafts)
                    self._drafted.add(sequence)
                    self.drafting.links.verifies(sequence, drafts)

    def _num_drafts(self, sequence: Sequence, speculation: Speculation) -> int:
        """No more than wanted, than can still come (verifying k yields up to k + 1 tokens), and than leaves every
        running sequence its token of the step."""
        room = self.builder.budget - self.replica.num_active
        num_coming = sequence.request.max_length - sequence.num_tokens - 1
        return max(0, min(speculation.num_wanted(sequence), num_coming, room))

    def _room_for(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """New blocks for so many tokens more, None where only preemption would bring them."""
        missing = self.replica.num_missing(sequence, sequence.num_computed_tokens + num_tokens)
        if not self.replica.can_grow(sequence, missing, self._block_budget.reserve):
            return None
        return self.replica.grow(sequence, *missing)

    def _decode(self) -> tuple[list[Sequence], list[Sequence]]:
        """Give its token to each sequence that lacks one and has room for it in its blocks, as most do.  Returns those
        that lack one and need a block, and those that lack more; a sequence whose last token is coming lacks none."""
        plain: list[Sequence] = []
        growing: list[Sequence] = []
        prefills: list[Sequence] = []
        budget, block_size = self.builder.budget, self.replica.block_size
        drafted, has_windows = self._drafted, bool(self.replica.sliding)
        for sequence in self.replica.active:
            num_coming = len(sequence.token_ids) + sequence.num_pending
            num_behind = num_coming - sequence.num_computed_tokens
            if num_behind == 0 or num_coming >= sequence.request.max_length:
                continue
            if drafted and sequence in drafted:
                continue
            if sequence.num_pending and sequence.request.search is not None:
                continue  # which token follows is not the worker's to say
            if num_behind > 1:
                prefills.append(sequence)
            elif has_windows and self.replica.is_at_edge(sequence, num_coming):
                growing.append(sequence)
            elif num_coming <= len(sequence.block_ids) * block_size and len(plain) < budget:
                plain.append(sequence)
            else:
                growing.append(sequence)
        self.builder.schedule_one_each(plain)
        return growing, prefills

    def _go_on(self, sequence: Sequence, num_tokens: int, num_samples: int) -> None:
        """Give a running sequence its next tokens, preempting others or itself where blocks run out."""
        missing = self.replica.num_missing(sequence, sequence.num_computed_tokens + num_tokens)
        while not self.replica.can_grow(sequence, missing):
            if self.replica.moves.give_way() or self._preemption.take_from_resting():
                continue
            victim = self._preemption.victim(sequence)
            self._preemption.preempt(victim, "no_free_blocks")
            self.builder.has_preempted = True
            if victim is sequence:
                return
        self.builder.schedule(sequence, num_tokens, num_samples, self.replica.grow(sequence, *missing))

    def _count_chunks(self, step: Step) -> None:
        """Parts that compute no sequence's last token."""
        if all(step.num_samples):
            return
        for sequence, num_samples in zip(step.sequences, step.num_samples, strict=True):
            if not num_samples:
                self.counters.num_chunked_prefills += sequence.is_prefilling
                self.accounts.computed_in_part(sequence)

    # -- waiting sequences

    def _make_idle_give_way(self) -> None:
        """No sequence can go on: beams that wait for others of their search make room for these."""
        for beam in idle_beams(self.replica):
            if self.builder.step.sequences or not self.replica.waiting:
                return
            if beam.status is Status.RUNNING:
                self._preemption.send_back(beam, "idle")
                self._admit_waiting()

    def _admit_ahead(self) -> None:
        """Start those that go ahead, unless blocks ran out meanwhile: then in the next step."""
        if not self._ahead or self.builder.has_preempted:
            return
        self._prefixes.look()
        for sequence in self._ahead:
            if self.builder.budget == 0 or not self._num_rows_to_have or not self._start(sequence):
                return

    def _admit_waiting(self) -> None:
        if not self.replica.waiting:
            return
        if not self._num_rows_to_have:
            self._obstacle = (Phase.QUEUE_ROWS, None)
            return
        self._prefixes.look()
        for sequence in self.replica.waiting:
            if sequence.is_background and self.replica.has_foreground:
                self._stop(sequence, Phase.QUEUE_FAIRNESS)
                return
            if not self._has_place(sequence):
                return
            if self._may_start(sequence) and not self._start(sequence):
                return

    @property
    def _num_rows_to_have(self) -> int:
        """Free rows, and those that resting sequences would give up."""
        return self.replica.num_free_rows + self.replica.num_resting

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether there is a row and a token of the budget for it; one that was preempted must be out of all steps."""
        if self.builder.budget == 0:
            return self._stop(sequence, Phase.QUEUE_BUDGET)
        if not self._num_rows_to_have:
            return self._stop(sequence, Phase.QUEUE_ROWS)
        return not self.replica.is_in_step(sequence) or self._stop(sequence, Phase.QUEUE_STEP)

    def _stop(self, sequence: Sequence, cause: Phase) -> bool:
        """The queue goes no further in this step: False."""
        self._obstacle = (cause, sequence)
        self.accounts.held_up(sequence, self.replica)
        return False

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether nothing of its own stands in its way."""
        if awaits_sibling(self.replica, sequence):
            self.accounts.passed_over(sequence, Phase.QUEUE_SIBLING)
            return False
        if must_be_alone(self.replica, sequence):
            self.accounts.passed_over(sequence, Phase.LOST)
            return False
        if not self._adapter_room.has_room(sequence):
            self.accounts.passed_over(sequence, Phase.QUEUE_ROWS)
            return False
        return not (sequence.num_in_flight or is_idle(sequence))

    def _start(self, sequence: Sequence) -> bool:
        """False where blocks or budget do not allow."""
        if not self._adapter_room.has_room(sequence):  # another one has begun since it was chosen
            return True
        return self._fork(sequence) if can_fork(self.replica, sequence) else self._admit(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Start a sequence with what the prefix cache has of it; False where blocks or budget do not allow."""
        replica, hit = self.replica, self._prefixes.hit(sequence)
        num_hits = len(hit.blocks)  # whose list becomes the sequence's own
        if self._prefixes.is_coming(sequence, hit.blocks, self._block_budget.reserve):
            self.accounts.passed_over(sequence, Phase.QUEUE_SIBLING)
            return True  # a step or a fetch later it is a hit, and the next sequence may start now
        start = self._starts.find(sequence, hit)
        num_cached = num_hits * replica.block_size + start.num_tokens
        if (num_wanted := replica.end_of(sequence) - num_cached) <= 0:
            return True  # all that is computed here is there: it goes on elsewhere
        num_tokens = self._chunks.size(sequence, num_cached, num_wanted)
        if num_tokens == 0:
            is_held_back = self.builder.budget > 0 and sequence.tenant in self._chunks.slow
            return self._stop(sequence, Phase.QUEUE_FAIRNESS if is_held_back else Phase.QUEUE_BUDGET)
        if not self._make_room(lambda: self._block_budget.num_lacking_beside(sequence, hit)):
            return self._stop(sequence, Phase.QUEUE_BLOCKS)
        start = self._starts.hold(start, sequence, hit)
        num_cached = num_hits * replica.block_size + start.num_tokens
        num_all = self._block_budget.num_blocks(sequence) if sequence.is_protected else 0
        replica.share_hit(sequence, hit)
        sequence.num_registered_blocks = num_hits
        num_tokens = min(num_tokens, replica.room_in_windows(sequence, num_cached, self._block_budget.reserve))
        count, *sliding = replica.num_missing(sequence, num_cached + num_tokens)
        replica.grow(sequence, num_all - num_hits if num_all else count, *sliding)
        self.counters.num_block_copies += self._starts.copy(sequence, start, num_hits)
        self._begin(sequence, num_cached, num_tokens)
        if (snapshot := self._checkpoints.load(sequence, num_cached // replica.block_size)) is not None:
            self.builder.step.loads[sequence] = snapshot
        self._prefixes.fill(sequence, num_tokens)
        self.counters.num_prefix_cache_queries += sequence.num_tokens
        self.counters.num_prefix_cache_hits += num_cached
        return True

    def _fork(self, sequence: Sequence) -> bool:
        """Start a sequence on its sibling's prompt; False where no block is left for it."""
        if not self._make_room(self._block_budget.num_lacking_to_fork):
            return self._stop(sequence, Phase.QUEUE_BLOCKS)
        num_computed = fork(self.replica, self.builder, sequence)
        self.counters.num_block_copies += 1
        self._begin(sequence, num_computed, 1)
        return True

    def _make_room(self, lacking: Callable[[], list[int]]) -> bool:
        """Whether there are a row and blocks for one more, for which resting sequences give way."""
        while not self.replica.num_free_rows or max(lacking()) > 0:
            if not self._preemption.take_from_resting():
                return False
        return True

    def _begin(self, sequence: Sequence, num_computed: int, num_tokens: int) -> None:
        self.replica.start(sequence)
        sequence.status = Status.RUNNING
        sequence.num_computed_tokens = num_computed
        self.accounts.admitted(sequence, self.replica)
        if sequence.num_cached_tokens < 0:
            self.shares.charge_prompt(sequence.tenant, sequence.num_tokens - num_computed)
            sequence.num_cached_tokens = min(num_computed, sequence.request.num_prompt_tokens)
            if (clock := self.accounts.sequences.get(sequence)) is not None:
                num_usable, refusal = self._prefixes.num_usable(sequence), self._prefixes.refusal(sequence)
                self.misses.explain(sequence, clock, self.replica, num_usable, refusal)
        self.builder.admit(sequence, num_tokens)
        self.journal.sequence(
            "sequence_scheduled", sequence, worker=self.replica.instance, num_cached_tokens=num_computed
        )
