"""What a step yielded, given to those for whom it was computed: tokens, candidates of beams, embeddings, and what a
worker refused or could not do."""

from __future__ import annotations

from services.scheduler.consistency.reconciliation import Reconciliation
from services.scheduler.consistency.results import check_order, check_result, give_logprobs
from services.scheduler.lifecycle.assignment import ReplicaAssignment
from services.scheduler.lifecycle.beams import conclude, is_usable, next_moves, regroup
from services.scheduler.lifecycle.finalizer import RequestFinalizer
from services.scheduler.lifecycle.stopping import finish_of
from services.scheduler.speculation.drafting import Drafting
from services.scheduler.state import phases
from services.scheduler.state.beam_search import BeamSearch
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence, Status
from services.scheduler.state.step import Step
from services.scheduler.telemetry.books import Books
from shared.errors import RejectCode, RequestError
from shared.grammar import refusal
from shared.messages import FinishReason, StepResult

MAX_REASON = 500  # characters of a worker's words

Finish = tuple[FinishReason, int | None]  # why, and the token that did it


class StepResultProcessor:
    """Takes workers' answers in, one by one, in the order of their plans."""

    def __init__(
        self,
        finalizer: RequestFinalizer,
        assignment: ReplicaAssignment,
        drafting: Drafting,
        reconciliation: Reconciliation,
        books: Books,
    ) -> None:
        self._finalizer = finalizer
        self._outbound = finalizer.outbound
        self._assignment = assignment
        self._drafting = drafting
        self._reconciliation = reconciliation
        self._shares = books.shares
        self._counters = books.counters
        self._clock = books.clock

    def take(self, replica: Replica, result: StepResult, now: float) -> bool:
        """False where it is a repetition.  Raises StepLost where an earlier answer is missing, ProtocolError where it
        is none to its plan; then nothing of it is taken."""
        if not check_order(replica, result.step_id):
            return False
        self._clock.now = replica.heard_at = now
        step = replica.in_flight[0]
        asked = check_result(step, result, replica.capacity.vocab_size)
        replica.in_flight.popleft()
        if (speculation := self._drafting.speculations.get(replica)) is not None:
            speculation.record(step, now)
        if result.logprobs or result.prompt_logprobs:
            give_logprobs(step, result)
        if result.refused_rows:
            self._take_refused(replica, step, result)
        for entry, embedding in result.embeddings.items():
            step.sequences[entry].embedding = embedding
        offset = num_wasted = 0
        for sequence, count, num_samples in zip(step.sequences, result.num_sampled, asked, strict=True):
            if sequence.status is Status.FINISHED:
                num_wasted += count
            elif count < num_samples:
                self._lack(sequence)
            else:
                tokens = result.sampled_token_ids[offset : offset + count]
                self._give(sequence, tokens, replica.capacity.vocab_size)
            offset += count
        self._counters.num_output_tokens += offset - num_wasted
        if result.refused:
            self._refuse(step, result.refused)
        return True

    def _give(self, sequence: Sequence, tokens: list[int], vocab_size: int) -> None:
        """Give a sequence what was sampled for it; nothing where its prompt was computed in part."""
        sequence.num_in_flight -= 1
        if not tokens:
            return
        sequence.num_pending -= 1
        self._shares.charge_output(sequence.request.header.tenant, len(tokens))
        if sequence.request.search is not None:
            self._follow(sequence, sequence.request.search, vocab_size)
            return
        if sequence.num_drafts:
            self._drafting.judge(sequence, len(tokens) - 1)
        finish = self._append(sequence, tokens)
        if finish:
            sequence.finish_reason, sequence.stop_token_id = finish
            if sequence.clock is not None:
                sequence.clock.is_due = True
        self._outbound.emit(sequence)
        if finish:
            self._finalizer.finish(sequence)

    def _append(self, sequence: Sequence, tokens: list[int]) -> Finish | None:
        """Give a sequence its tokens up to the one that ends it; returns why that does."""
        for token in tokens:
            sequence.token_ids.append(token)
            if finish := finish_of(sequence):
                del sequence.logprobs[sequence.num_output_tokens :]
                return finish
        return None

    # -- beams

    def _follow(self, beam: Sequence, search: BeamSearch, vocab_size: int) -> None:
        """Take what a step says behind one beam; with that of the last one, the search goes on."""
        request, said = beam.request, beam.said
        beam.said = None
        if said is None or not is_usable(said, search, vocab_size):
            error = RequestError("a worker does not say which tokens are likely", code=RejectCode.INTERNAL)
            self._finalizer.fail(request, error)
            return
        search.hear(beam.index, said)
        if not search.is_ready:
            return
        phases.searched(request.sequences, self._clock.now)
        moves = next_moves(request, search)
        for sequence, source in regroup(request, moves, self._finalizer.leave):
            self._assignment.place_behind(sequence, source)
        if moves:
            return
        conclude(request, search)
        if len(request.sequences) < request.params.n:
            self._finalizer.fail(request, RequestError(f"n must be at most {len(search.hypotheses)}", field="n"))
        else:
            self._finalizer.conclude(request)

    # -- what was not done

    def _take_refused(self, replica: Replica, step: Step, result: StepResult) -> None:
        for request in self._reconciliation.take_refused(replica, step, result):
            text = "a worker refused to compute this request again and again: its blocks were others'"
            self._finalizer.fail(request, RequestError(text, code=RejectCode.INTERNAL))

    def _lack(self, sequence: Sequence) -> None:
        """What its grammar allows was not known when the step sampled: its last token is computed again, for its
        logits, in the next step or the one in flight."""
        sequence.num_in_flight -= 1
        sequence.num_pending -= 1
        sequence.num_drafts = 0
        self._counters.num_late_masks += 1
        if sequence.status is Status.RUNNING:
            sequence.num_computed_tokens -= 1

    def _refuse(self, step: Step, refused: dict[int, str]) -> None:
        """End requests whose grammar a worker cannot follow."""
        for entry, reason in refused.items():
            request = step.sequences[entry].request
            grammar = request.params.grammar
            if grammar is not None and not request.is_finished:
                self._finalizer.fail(request, refusal(grammar, reason[:MAX_REASON]))
