"""The drafts' part in the steps: requests to drafts, waiting for them, and verified proposals."""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.draft_length.proposal import NO_DRAFTS, DraftProposal, VerifiableDrafts
from services.scheduler.speculation.drafts import DraftLink, DraftLinks
from services.scheduler.speculation.records import DraftRecords
from services.scheduler.speculation.speculation import Speculation
from services.scheduler.state.counters import Counters
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence, Status
from services.scheduler.state.step import Step
from shared.messages import DraftProposals, StepResult, WorkerCapacity


class Drafting:
    """Between the links to drafts and the speculation of each worker.

    Invariant: each replica has a speculation exactly while there is a draft, or where its worker has a draft head.
    """

    def __init__(
        self,
        policy: Policy,
        counters: Counters,
        links: DraftLinks,
        records: DraftRecords,
        replicas: Mapping[str, Replica],
    ) -> None:
        self.links = links
        self._records = records
        self._policy = policy
        self._counters = counters
        self._replicas = replicas
        self.speculations: dict[Replica, Speculation] = {}  # by worker; read at every step, so without a method between

    def renew(self) -> None:
        """Drafts or workers have come or gone: what drafts are worth at a worker that had none is to be measured."""
        able = [one for one in self._replicas.values() if self.links or one.capacity.max_head_drafts]
        self.speculations = {replica: self.speculations.get(replica) or self._begin(replica) for replica in able}

    def _begin(self, replica: Replica) -> Speculation:
        fixed, longest = self._policy.num_draft_tokens, self._policy.max_num_draft_tokens
        if most := replica.capacity.max_head_drafts:
            fixed, longest = min(fixed, most), min(longest, most)
        return Speculation(self._records, fixed=fixed, longest=longest, may_run_ahead=not most)

    def forget(self, replica: Replica) -> None:
        """A worker has left."""
        self.speculations.pop(replica, None)

    def propose(self, message: DraftProposals, capacity: WorkerCapacity | None) -> bool:
        """As `Scheduler.propose`; `capacity` is that of the smallest worker."""
        link = self.links.by_epoch(message.epoch)
        if link is None:
            return False
        if capacity is None:
            return True  # no worker could verify them
        self.links.take(link, message, capacity.vocab_size)
        if num_steps := max(message.num_draft_tokens, default=0):
            for speculation in self.speculations.values():
                speculation.drafted(message.draft_time / num_steps)
        return True

    # -- draft heads of workers

    def num_wanted(self, replica: Replica, step: Step) -> list[int]:
        """Draft tokens that a worker's head is asked for behind each part of a step; empty: none.  One at least where
        any are, since what a sequence is given is decided with the next step."""
        most, speculation = replica.capacity.max_head_drafts, self.speculations.get(replica)
        if not most or speculation is None or not speculation.mode.num_draft_tokens:
            return []
        parts = zip(step.sequences, step.num_samples, strict=True)
        counts = [self._num_of_head(speculation, sequence, most) if samples else 0 for sequence, samples in parts]
        return counts if any(counts) else []

    def _num_of_head(self, speculation: Speculation, sequence: Sequence, most: int) -> int:
        request = sequence.request
        num_coming = request.max_length - sequence.num_tokens - 2
        if not request.step_params.speculate or request.search is not None or num_coming <= 0:
            return 0
        return min(max(1, speculation.num_wanted(sequence)), most, num_coming)

    def take_head_drafts(self, step: Step, result: StepResult) -> None:
        """What a worker's head drafts behind a step, whose tokens the sequences have."""
        offset = 0
        for sequence, count in zip(step.sequences, result.num_head_drafts, strict=True):
            if count and sequence.status is not Status.FINISHED:
                token_ids = result.head_draft_ids[offset : offset + count]
                self._records.propose(sequence, DraftProposal(sequence.num_tokens, token_ids, []))
            offset += count

    def usable(self, replica: Replica, sequence: Sequence) -> VerifiableDrafts:
        """What of a sequence's proposal still follows its tokens."""
        if not replica.capacity.max_head_drafts:
            return self.links.usable(sequence)
        proposal = self._records.of(sequence).proposal
        return NO_DRAFTS if proposal is None else proposal.behind(sequence.token_ids) or NO_DRAFTS

    # -- the drafts' part in a step

    def judge(self, step: Step, num_sampled: list[int]) -> None:
        """Count the accepted draft tokens of a step: for each sequence one fewer than its sampled tokens."""
        for sequence, drafts, count in zip(step.sequences, step.drafts, num_sampled, strict=True):
            if drafts.token_ids and count and sequence.status is not Status.FINISHED:
                self._judge(sequence, len(drafts.token_ids), count - 1)

    def _judge(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Count the draft tokens that were accepted as computed, unless the sequence has lost what it had computed."""
        if sequence.status is Status.RUNNING:
            sequence.num_computed_tokens += num_accepted
        record = self._records.add(sequence, num_drafts, num_accepted)
        self._counters.verified(num_drafts, num_accepted)
        replica = self._replicas.get(sequence.worker)
        speculation = None if replica is None else self.speculations.get(replica)
        if speculation is not None:
            speculation.judge(record, num_drafts, num_accepted)

    def awaits(self, replica: Replica, now: float) -> bool:
        """Whether the next plan has to wait for a step in flight or for drafts, which are asked for here."""
        speculation = self.speculations.get(replica)
        if speculation is None:
            return False
        if not replica.num_active:
            speculation.planned()  # those whose drafts were awaited have ended
            return False
        if not speculation.has_asked:
            if not speculation.choose(replica.active).num_draft_tokens:
                return False
            if replica.in_flight:
                return True
            self._ask(replica, speculation, now)
        if speculation.waits(now):
            return True
        self._counters.num_late_drafts += speculation.give_up()
        return False

    def planned(self, replica: Replica) -> None:
        """A worker's next step is sent."""
        if (speculation := self.speculations.get(replica)) is not None:
            speculation.planned()

    def _ask(self, replica: Replica, speculation: Speculation, now: float) -> None:
        """Send the drafts what was committed and ask for more; no step waits for them while prompts are computed, and
        none of background sequences, which others may come to wait for."""
        awaited: dict[DraftLink, int] = {}
        if replica.capacity.max_head_drafts:  # its drafts came with the last step
            speculation.ask(awaited, replica.active, now)
            return
        for sequence in replica.active:
            if sequence.can_verify and sequence.request.step_params.speculate:
                num_wanted = speculation.num_wanted(sequence)
                asked = self.links.tell(sequence, num_wanted, ahead=speculation.mode.runs_ahead)
                if asked is not None and len(self.links.usable(sequence).token_ids) < num_wanted:
                    awaited[asked[0]] = asked[1]
        if replica.is_in_background or any(not sequence.can_verify for sequence in replica.active):
            awaited.clear()
        speculation.ask(awaited, replica.active, now)

    @property
    def wake_time(self) -> float | None:
        """When the first replica that waits for drafts will have waited long enough."""
        times = (speculation.wake_time for speculation in self.speculations.values())
        return min((time for time in times if time is not None), default=None)
