"""Makes one step: who computes how many tokens, in which blocks."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler import phases
from services.scheduler.branching import branch_off, idle_beams, is_idle
from services.scheduler.counters import Counters
from services.scheduler.drafts import DraftLinks
from services.scheduler.fairness import Shares
from services.scheduler.journal import Journal
from services.scheduler.misses import Misses
from services.scheduler.moment import Moment
from services.scheduler.plan_builder import NONE, PlanBuilder
from services.scheduler.policy import Policy
from services.scheduler.replica import Replica, Step
from services.scheduler.sequence import Sequence, Status
from services.scheduler.sharing import Claims, slow_tenants
from services.scheduler.speculation import Speculation
from shared.messages import StepPlan
from shared.phases import Miss, Phase


class Batcher:
    """Fills one step's token budget: decodes first, then whoever goes ahead of others for fairness, then prefills that
    run, then those that wait.

    Order within each is by rank.  Where blocks run out, the victim is the cheapest to recompute among those less
    urgent than the one in need, or else itself; so the most urgent always goes on, and every step makes progress.
    """

    def __init__(
        self,
        replica: Replica,
        policy: Policy,
        counters: Counters,
        journal: Journal,
        max_model_len: int,
        drafts: DraftLinks,
        shares: Shares,
        misses: Misses,
        moment: Moment,
    ) -> None:
        self.replica = replica
        self.policy = policy
        self.counters = counters
        self.journal = journal
        self.max_model_len = max_model_len
        self.drafts = drafts
        self.shares = shares
        self.misses = misses
        self.moment = moment
        self.builder = PlanBuilder(replica, policy.max_num_batched_tokens, rejection=policy.acceptance == "rejection")
        self._verified: set[Sequence] = set()
        self._filling: set[bytes] = set()
        self._ahead: list[Sequence] = []
        self._slow = slow_tenants(replica, shares) if policy.enable_chunked_prefill else frozenset()
        self._slow_budget = policy.fair_prefill_tokens or policy.max_num_batched_tokens
        self._obstacle: tuple[Phase, Sequence | None] = (Phase.QUEUE_STEP, None)  # where the queue stopped, and why

    def next_plan(self) -> StepPlan | None:
        """The plan, counted as sent; None where no sequence can go on."""
        if self.replica.branches:
            self.counters.num_block_copies += branch_off(self.replica, self.builder, self._reserve())
        if self.replica.is_shared:
            self._claim()
        self._verify()
        growing, prefills = self._decode()
        for sequence in growing:
            if self.builder.budget > 0 and sequence.status is Status.RUNNING:
                self._go_on(sequence, 1, 1)
        self._admit_ahead()
        for sequence in prefills:
            num_behind = sequence.num_behind
            if sequence.status is Status.RUNNING and (num_tokens := self._chunk(sequence, num_behind)):
                self._go_on(sequence, num_tokens, int(num_tokens == num_behind))
        if self.builder.has_preempted:
            self._obstacle = (Phase.QUEUE_BLOCKS, None)
        else:
            self._admit_waiting()
        if not (self.builder.step.sequences or self.replica.in_flight):
            self._make_idle_give_way()
        if self.replica.waiting or self.replica.waits:
            self.replica.waits.look(self.replica.waiting.firsts, *self._obstacle, self.moment.now)
        if not self.builder.step.sequences:
            return None
        plan = self.builder.commit()
        self._register_full(self.builder.step)
        return plan

    # -- between tenants

    def _claim(self) -> None:
        """Choose who goes ahead of tenants that have more, as far as the step has room, and take rows for them.

        Before anything of the step is planned: who gives its row has no part in it.
        """
        claims = Claims(self.replica, self.shares, slack=self.policy.max_num_batched_tokens)
        room = self.builder.budget - len(self.replica.running)
        for tenant in claims.tenants():
            for sequence in self.replica.waiting.of(tenant):
                if room <= 0 or not self._may_start(sequence) or not self._make_way(sequence, tenant, claims):
                    break
                claims.grant(tenant)
                self._ahead.append(sequence)
                room -= sequence.num_tokens

    def _make_way(self, sequence: Sequence, tenant: str, claims: Claims) -> bool:
        """Take the row and the blocks that it lacks from those who have more; False, and nothing, where they cannot."""
        if not (claims.precedes(tenant) or any(claims.givers(tenant))):
            return False
        num_rows = len(self._ahead) + 1 - self.replica.num_free_rows
        num_blocks = self._num_lacking(sequence)
        victims: list[Sequence] = []
        while len(victims) < num_rows or sum(map(self._num_freed, victims)) < num_blocks:
            victim = self._giving(claims.givers(tenant), victims)
            if victim is None:
                for other in victims:
                    claims.grant(other.tenant)
                return False
            claims.take(victim.tenant)
            victims.append(victim)
        for victim in victims:
            self._preempt(victim, "fairness")
        return True

    def _giving(self, givers: Iterable[str], chosen: list[Sequence]) -> Sequence | None:
        """Who is cheapest to recompute of the first of these tenants that has somebody to give."""
        for giver in givers:
            candidates = [s for s in self.replica.running if s.tenant == giver and s not in chosen]
            if victim := min((s for s in candidates if not s.is_protected), key=self._victim_order, default=None):
                return victim
        return None

    def _num_lacking(self, sequence: Sequence) -> int:
        """Blocks that would have to become free before a waiting sequence, and those that go ahead too, can start."""
        if self._can_fork(sequence):
            return 1 + self._reserve() - self.replica.pool.num_available
        promised = sum(self.replica.blocks_for(other.num_tokens) for other in self._ahead)
        hits = self._hits(sequence)
        num_left = self.replica.pool.num_available - (len(hits) - self.replica.pool.num_held_of(hits))
        return self._num_needed(sequence) - len(hits) + promised + self._reserve() - num_left

    def _num_freed(self, victim: Sequence) -> int:
        """Blocks that nobody else holds, and the one kept for it to grow into."""
        ref_counts = self.replica.pool.ref_counts
        return 1 + sum(1 for block in victim.block_ids if ref_counts[block] == 1)

    def _admit_ahead(self) -> None:
        """Start those that go ahead, unless blocks ran out meanwhile: then in the next step."""
        if not self._ahead or self.builder.has_preempted:
            return
        self._filling = self._blocks_being_filled()
        for sequence in self._ahead:
            if self.builder.budget == 0 or self.replica.num_free_rows == 0 or not self._start(sequence):
                return

    # -- running sequences

    def _verify(self) -> None:
        """Give draft tokens to the sequences that were asked for: as many as fit, without preempting for them."""
        speculation = self.replica.speculation
        if speculation is None or not speculation.has_asked:
            return
        self.builder.step.arm = speculation.arm
        for sequence in self.replica.running:
            if sequence.can_verify and sequence.following is not None:
                drafts = self.drafts.usable(sequence).first(self._num_drafts(sequence, speculation))
                num_tokens = 1 + len(drafts.token_ids)
                if num_tokens > 1 and (new_blocks := self._room_for(sequence, num_tokens)) is not None:
                    self.builder.schedule(sequence, num_tokens, 1, new_blocks, drafts)
                    self._verified.add(sequence)
                    sequence.following.num_verified = sequence.num_tokens + len(drafts.token_ids)

    def _num_drafts(self, sequence: Sequence, speculation: Speculation) -> int:
        """No more than wanted, than can still come (verifying k yields up to k + 1 tokens), and than leaves every
        running sequence its token of the step."""
        longest = min(sequence.request.max_length, self.max_model_len)
        room = self.builder.budget - len(self.replica.running)
        return max(0, min(speculation.num_wanted(sequence), longest - sequence.num_tokens - 1, room))

    def _room_for(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """New blocks for so many tokens more, None where only preemption would bring them."""
        num_missing = sequence.num_computed_tokens + num_tokens - len(sequence.block_ids) * self.replica.block_size
        if num_missing <= 0:
            return NONE
        num_new = self.replica.blocks_for(num_missing)
        if num_new > self.replica.pool.num_available - self._reserve():
            return None
        return self.replica.grow(sequence, num_new)

    def _decode(self) -> tuple[list[Sequence], list[Sequence]]:
        """Give its token to each sequence that lacks one and has room for it in its blocks, as most do.  Returns those
        that lack one and need a block, and those that lack more; a sequence whose last token is coming lacks none."""
        growing: list[Sequence] = []
        prefills: list[Sequence] = []
        builder, block_size, max_model_len = self.builder, self.replica.block_size, self.max_model_len
        verified = self._verified
        for sequence in self.replica.running:
            num_coming = len(sequence.token_ids) + sequence.num_pending
            num_behind = num_coming - sequence.num_computed_tokens
            if num_behind == 0 or num_coming >= sequence.request.max_length or num_coming >= max_model_len:
                continue
            if sequence.num_drafts or sequence in verified:
                continue
            if sequence.num_pending and sequence.request.search is not None:
                continue  # which token follows is not the worker's to say
            if num_behind > 1:
                prefills.append(sequence)
            elif num_coming <= len(sequence.block_ids) * block_size and builder.budget > 0:
                builder.schedule(sequence, 1, 1, NONE)
            else:
                growing.append(sequence)
        return growing, prefills

    def _go_on(self, sequence: Sequence, num_tokens: int, num_samples: int) -> None:
        """Give a running sequence its next tokens, preempting others or itself where blocks run out."""
        num_missing = sequence.num_computed_tokens + num_tokens - len(sequence.block_ids) * self.replica.block_size
        if num_missing <= 0:
            self.builder.schedule(sequence, num_tokens, num_samples, NONE)
            return
        num_new = self.replica.blocks_for(num_missing)
        while num_new > self.replica.pool.num_available:
            victim = self._victim(sequence)
            self._preempt(victim)
            self.builder.has_preempted = True
            if victim is sequence:
                return
        self.builder.schedule(sequence, num_tokens, num_samples, self.replica.grow(sequence, num_new))

    def _chunk(self, sequence: Sequence, num_behind: int) -> int:
        """How many of its tokens a sequence may compute in this step."""
        threshold = self.policy.long_prefill_token_threshold
        num_tokens = min(num_behind, self.builder.budget)
        if sequence.tenant in self._slow and num_behind > 1:
            num_tokens = min(num_tokens, self._slow_budget)
            self._slow_budget -= num_tokens
        if threshold and num_behind > 1:
            num_tokens = min(num_tokens, threshold)
        if num_tokens < num_behind and not self.policy.enable_chunked_prefill:
            return 0
        return num_tokens

    def _victim(self, needy: Sequence) -> Sequence:
        candidates = [s for s in self.replica.running if s.rank > needy.rank and not s.is_protected]
        return min(candidates, key=self._victim_order, default=needy)

    def _victim_order(self, sequence: Sequence) -> tuple[int, list[float]]:
        """The cheapest to recompute first, and of those the least urgent."""
        return self._recompute_cost(sequence), [-part for part in sequence.rank]

    def _recompute_cost(self, sequence: Sequence) -> int:
        """Tokens to compute again: blocks that others hold too survive."""
        pool = self.replica.pool
        shared = sum(1 for block in sequence.block_ids if pool.ref_counts[block] > 1)
        return sequence.num_computed_tokens - shared * self.replica.block_size

    def _preempt(self, victim: Sequence, cause: str = "no_free_blocks") -> None:
        self.counters.num_preemptions += 1
        victim.num_preemptions += 1
        self.journal.sequence("sequence_preempted", victim, cause=cause, num_computed_tokens=victim.num_computed_tokens)
        self.builder.drop(victim)
        self.replica.preempt(victim)
        self.replica.waiting.add(victim)
        phases.preempted(victim, self.moment.now)

    # -- waiting sequences

    def _make_idle_give_way(self) -> None:
        """Nobody can go on: beams that wait for others of their search make room for these."""
        for beam in idle_beams(self.replica):
            if self.builder.step.sequences or not self.replica.waiting:
                return
            self.counters.num_preemptions += 1
            self.journal.sequence("sequence_preempted", beam, cause="idle")
            self.replica.preempt(beam)
            self.replica.waiting.add(beam)
            phases.preempted(beam, self.moment.now)
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        if not self.replica.num_free_rows:
            self._obstacle = (Phase.QUEUE_ROWS, None)
        if not self.replica.waiting or not self.replica.num_free_rows:
            return
        self._filling = self._blocks_being_filled()
        for sequence in self.replica.waiting:
            if not self._has_place(sequence):
                return
            if self._may_start(sequence) and not self._start(sequence):
                return

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether there is a row and a token of the budget for it; one that was preempted must be out of all steps."""
        if self.builder.budget == 0:
            return self._stop(sequence, Phase.QUEUE_BUDGET)
        if self.replica.num_free_rows == 0:
            return self._stop(sequence, Phase.QUEUE_ROWS)
        return not sequence.num_in_flight or self._stop(sequence, Phase.QUEUE_STEP)

    def _stop(self, sequence: Sequence, cause: Phase) -> bool:
        """The queue goes no further in this step: False."""
        self._obstacle = (cause, sequence)
        phases.held_up(sequence, self.replica.waits, self.moment.now)
        return False

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether nothing of its own stands in its way."""
        if self._waits_for_sibling(sequence):
            phases.passed_over(sequence, Phase.QUEUE_SIBLING, self.moment.now)
            return False
        if self._must_be_alone(sequence):
            phases.passed_over(sequence, Phase.LOST, self.moment.now)
            return False
        return not (sequence.num_in_flight or is_idle(sequence))

    def _start(self, sequence: Sequence) -> bool:
        """False where blocks or budget do not allow."""
        return self._fork(sequence) if self._can_fork(sequence) else self._admit(sequence)

    def _must_be_alone(self, sequence: Sequence) -> bool:
        """Whether it may be what kills workers, and so may another request that runs."""
        request = sequence.request
        return request.is_quarantined and any(
            other.request is not request and other.request.is_quarantined for other in self.replica.running
        )

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether the prompt that this one will share is about to be computed."""
        parent = sequence.parent
        if parent is sequence or parent.worker != self.replica.instance or sequence.num_output_tokens:
            return False
        return parent.status is Status.WAITING or (parent.status is Status.RUNNING and parent.is_prefilling)

    def _can_fork(self, sequence: Sequence) -> bool:
        parent = sequence.parent
        if parent is sequence or parent.worker != self.replica.instance or sequence.num_output_tokens:
            return False
        return parent.status is Status.RUNNING and not parent.is_prefilling and not sequence.is_protected

    def _admit(self, sequence: Sequence) -> bool:
        """Start a sequence with what the prefix cache has of it; False where blocks or budget do not allow."""
        hits = self._hits(sequence)
        if self._is_being_filled(sequence, len(hits)):
            phases.passed_over(sequence, Phase.QUEUE_SIBLING, self.moment.now)
            return True  # one step later it is a hit, and the next sequence may start now
        num_cached = len(hits) * self.replica.block_size
        num_tokens = self._chunk(sequence, sequence.num_tokens - num_cached)
        pool, replica = self.replica.pool, self.replica
        num_left = pool.num_available - (len(hits) - pool.num_held_of(hits))
        num_needed = self._num_needed(sequence)
        if num_tokens == 0:
            is_held_back = self.builder.budget > 0 and sequence.tenant in self._slow
            return self._stop(sequence, Phase.QUEUE_FAIRNESS if is_held_back else Phase.QUEUE_BUDGET)
        if num_needed - len(hits) > num_left - self._reserve():
            return self._stop(sequence, Phase.QUEUE_BLOCKS)
        replica.share(sequence, hits, [pool.hash_generations[block] for block in hits])
        num_new = (num_needed if sequence.is_protected else replica.blocks_for(num_cached + num_tokens)) - len(hits)
        sequence.num_registered_blocks = len(hits)
        replica.grow(sequence, num_new)
        self._begin(sequence, num_cached, num_tokens)
        self._filling.update(self._blocks_filled_by(sequence, num_tokens))
        self.counters.num_prefix_cache_queries += sequence.num_tokens
        self.counters.num_prefix_cache_hits += num_cached
        return True

    def _num_needed(self, sequence: Sequence) -> int:
        """Blocks without which a sequence is not admitted: those of its tokens, or, so that it will never lack one and
        nobody need be preempted for it, all that it can come to need."""
        longest = min(sequence.request.max_length, self.max_model_len)
        return self.replica.blocks_for(longest if sequence.is_protected else sequence.num_tokens)

    def _hits(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the longest prefix; at least one token is left to compute, for its logits."""
        return self.replica.pool.lookup(self._usable_hashes(sequence))

    def _usable_hashes(self, sequence: Sequence) -> list[bytes]:
        if self._refusal(sequence) is not None:
            return []
        return sequence.hash_blocks(self.replica.block_size)[: self._num_usable(sequence)]

    def _num_usable(self, sequence: Sequence) -> int:
        """Blocks that could be hits: not that of the last token."""
        return (sequence.num_tokens - 1) // self.replica.block_size

    def _refusal(self, sequence: Sequence) -> Miss | None:
        """Why the prefix cache is not asked for a sequence."""
        if not self.policy.enable_prefix_caching:
            return Miss.OFF
        return Miss.NOT_ASKED if sequence.needs_all_states else None

    def _fork(self, sequence: Sequence) -> bool:
        """Start a sequence on its sibling's prompt: full blocks are shared, the one to be written in is copied."""
        replica, parent = self.replica, sequence.parent
        num_computed = sequence.request.num_prompt_tokens - 1
        num_shared = num_computed // replica.block_size
        if replica.pool.num_available - self._reserve() < 1:
            return self._stop(sequence, Phase.QUEUE_BLOCKS)
        replica.share(sequence, parent.block_ids[:num_shared], parent.block_generations[:num_shared])
        (own,) = replica.grow(sequence, 1)
        sequence.num_registered_blocks = num_shared
        self.builder.copy(sequence, parent.block_ids[num_shared], parent.block_generations[num_shared], own)
        self.counters.num_block_copies += 1
        self._begin(sequence, num_computed, 1)
        return True

    def _begin(self, sequence: Sequence, num_computed: int, num_tokens: int) -> None:
        self.replica.start(sequence)
        sequence.status = Status.RUNNING
        sequence.num_computed_tokens = num_computed
        phases.admitted(sequence, self.replica.waits, self.moment.now)
        if sequence.num_cached_tokens < 0:
            self.shares.charge_prompt(sequence.request.header.tenant, sequence.num_tokens - num_computed)
            sequence.num_cached_tokens = min(num_computed, sequence.request.num_prompt_tokens)
            self.misses.explain(sequence, self.replica, self._num_usable(sequence), self._refusal(sequence))
        self.builder.admit(sequence, num_tokens)
        self.journal.sequence(
            "sequence_scheduled", sequence, worker=self.replica.instance, num_cached_tokens=num_computed
        )

    def _reserve(self) -> int:
        """Blocks left to the running sequences to grow into, one each: an admission must not preempt at once."""
        return len(self.replica.running)

    # -- the prefix cache

    def _is_being_filled(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether another sequence computes in this very step the block that this one would have to compute first.

        Of many that arrive at once with one prefix, the first computes it alone; the others follow a step behind.
        """
        hashes = self._usable_hashes(sequence)
        return num_hits < len(hashes) and hashes[num_hits] in self._filling

    def _blocks_being_filled(self) -> set[bytes]:
        """Names of the prompt blocks that the step computes so far; they are registered when it is committed."""
        step = self.builder.step
        parts = zip(step.sequences, step.num_scheduled, strict=True)
        return {name for part in parts if part[1] > 1 for name in self._blocks_filled_by(*part)}

    def _blocks_filled_by(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        if not self.policy.enable_prefix_caching:
            return []
        size, num_computed = self.replica.block_size, sequence.num_computed_tokens
        return sequence.hash_blocks(size)[num_computed // size : (num_computed + num_tokens) // size]

    def _register_full(self, step: Step) -> None:
        """Make the blocks findable that a committed step fills with known tokens: plans are executed in order, so
        whoever finds one reads it after it was written."""
        size, caches = self.replica.block_size, self.policy.enable_prefix_caching
        for sequence, num_samples in zip(step.sequences, step.num_samples, strict=True):
            if not num_samples:
                self.counters.num_chunked_prefills += sequence.is_prefilling
                if sequence.clock is not None:
                    sequence.clock.num_chunks += 1
            if caches and sequence.num_computed_tokens // size > sequence.num_registered_blocks:
                self._register(sequence)

    def _register(self, sequence: Sequence) -> None:
        size = self.replica.block_size
        hashes = sequence.hash_blocks(size)
        num_full = min(sequence.num_computed_tokens // size, len(hashes))
        for index in range(sequence.num_registered_blocks, num_full):
            self.replica.pool.register(sequence.block_ids[index], hashes[index], sequence.block_generations[index])
        sequence.num_registered_blocks = max(sequence.num_registered_blocks, num_full)
