"""Gives the results of steps to their sequences: tokens, candidates of beams, embeddings, refusals and what a worker
could not do."""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.consistency.reconciliation import Reconciliation
from services.scheduler.consistency.results import check_order, check_result
from services.scheduler.lifecycle.assignment import ReplicaAssignment
from services.scheduler.lifecycle.beams import conclude, is_usable, next_moves, regroup
from services.scheduler.lifecycle.finalizer import RequestFinalizer
from services.scheduler.lifecycle.stopping import finish_of
from services.scheduler.speculation.drafting import Drafting
from services.scheduler.state.beam_search import BeamSearch
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence, Status
from services.scheduler.state.step import Step
from services.scheduler.telemetry.books import Books
from shared.errors import RejectCode, RequestError
from shared.messages import FinishReason, StepResult, TokenLogprobs
from shared.requests.grammar import refusal

MAX_REASON = 500  # characters of a worker's reason

Candidates = Mapping[Sequence, TokenLogprobs]  # of beams, with each sample
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
        self._outbound = finalizer.tables.outbound
        self._assignment = assignment
        self._drafting = drafting
        self._reconciliation = reconciliation
        self._shares = books.shares
        self._counters = books.counters
        self._accounts = books.accounts

    def take(self, replica: Replica, result: StepResult, now: float) -> bool:
        """False where it is a repetition.  Raises StepLost where an earlier answer is missing, ProtocolError where it
        is none to its plan; then nothing of it is taken."""
        if not check_order(replica, result.step_id):
            return False
        self._accounts.clock.now = self._accounts.workers[replica].heard_at = now
        step = replica.in_flight[0]
        asked = check_result(step, result, replica.capacity.vocab_size)
        replica.in_flight.popleft()
        if replica.moves.space:
            replica.moves.speed.computed(sum(step.num_scheduled), result.device_time)
        if (speculation := self._drafting.speculations.get(replica)) is not None:
            speculation.record(step, now)
        if result.prompt_logprobs or result.embeddings:
            self._take_prompts(step, result)
        candidates = give_logprobs(step, result) if result.logprobs else {}
        if result.refused_rows:
            self._take_refused(replica, step, result)
        if step.num_drafts:
            self._drafting.judge(step, result.num_sampled)
        sampled, vocab_size = result.sampled_token_ids, replica.capacity.vocab_size
        num_given: dict[str, int] = {}  # tokens, by tenant
        offset = num_wasted = 0
        for sequence, count, num_samples in zip(step.sequences, result.num_sampled, asked, strict=True):
            if sequence.status is Status.FINISHED:
                num_wasted += count
            elif count < num_samples:
                self._lack(sequence)
            else:
                tenant = sequence.request.tenant
                num_given[tenant] = num_given.get(tenant, 0) + count
                self._give(sequence, sampled[offset : offset + count], candidates, vocab_size)
            offset += count
        for tenant, count in num_given.items():
            self._shares.charge_output(tenant, count)
        self._counters.num_output_tokens += offset - num_wasted
        if result.num_head_drafts:
            self._drafting.take_head_drafts(step, result)
        if result.refused:
            self._refuse(step, result.refused)
        return True

    def _give(self, sequence: Sequence, tokens: list[int], candidates: Candidates, vocab_size: int) -> None:
        """Give a sequence what was sampled for it; nothing where its prompt was computed in part."""
        sequence.num_in_flight -= 1
        if not tokens:
            return
        request = sequence.request
        sequence.num_pending -= 1
        if request.search is not None:
            self._follow(sequence, request.search, candidates.get(sequence), vocab_size)
            return
        finish = self._append(sequence, tokens)
        if finish:
            sequence.finish_reason, sequence.stop_token_id = finish
            self._accounts.due(sequence)
            self._outbound.emit(sequence)
            self._finalizer.finish(sequence)
        elif not request.is_gathered or self._outbound.is_due(sequence):  # no further call for each streamed token
            self._outbound.emit(sequence)

    def _append(self, sequence: Sequence, tokens: list[int]) -> Finish | None:
        """Give a sequence its tokens up to the one that ends it; returns why that does."""
        for token in tokens:
            sequence.token_ids.append(token)
            if finish := finish_of(sequence):
                del sequence.logprobs[sequence.num_output_tokens :]
                return finish
        return None

    def _take_prompts(self, step: Step, result: StepResult) -> None:
        """Keep what is known of prompts until it goes out with the first tokens."""
        for entry, logprobs in result.prompt_logprobs.items():
            sequence = step.sequences[entry]
            if sequence.wants_prompt_logprobs and sequence.status is Status.RUNNING:
                self._outbound.take_prompt_logprobs(sequence, step.num_computed[entry], logprobs)
        for entry, embedding in result.embeddings.items():
            if step.sequences[entry].status is not Status.FINISHED:
                self._outbound.take_embedding(step.sequences[entry], embedding)

    # -- beams

    def _follow(self, beam: Sequence, search: BeamSearch, candidates: TokenLogprobs | None, vocab_size: int) -> None:
        """Take the candidates behind one beam; with those of the last one, the search goes on."""
        request = beam.request
        if candidates is None or not is_usable(candidates, search, vocab_size):
            error = RequestError("a worker sent no usable candidates for the beam search", code=RejectCode.INTERNAL)
            self._finalizer.fail(request, error)
            return
        search.hear(beam.index, candidates)
        if not search.is_ready:
            return
        self._accounts.searched(request.sequences)
        moves = next_moves(request, search)
        for sequence, source in regroup(request, moves, self._finalizer.leave):
            self._assignment.place_behind(sequence, source)
        for move in moves:
            if move.slot == move.source and not move.is_taken:
                self._assignment.rewrite(request.sequences[move.slot])
        if moves:
            return
        slots = request.sequences[:]
        conclude(request, search)
        for sequence in slots[len(request.sequences) :]:
            self._finalizer.tables.forget(sequence)
        self._accounts.concluded(request.sequences, slots[0])
        if len(request.sequences) < request.params.n:
            self._finalizer.fail(request, RequestError(f"n must be at most {len(search.hypotheses)}", field="n"))
        else:
            self._finalizer.conclude(request)

    # -- refusals

    def _take_refused(self, replica: Replica, step: Step, result: StepResult) -> None:
        for request in self._reconciliation.take_refused(replica, step, result):
            text = "a worker refused this request too often: it and the scheduler disagreed about the request's state"
            self._finalizer.fail(request, RequestError(text, code=RejectCode.INTERNAL))

    def _lack(self, sequence: Sequence) -> None:
        """What its grammar allows was not known when the step sampled: its last token is computed again, for its
        logits, in the next step or the one in flight."""
        sequence.num_in_flight -= 1
        sequence.num_pending -= 1
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


def give_logprobs(step: Step, result: StepResult) -> dict[Sequence, TokenLogprobs]:
    """Hand a step's log-probabilities to the sequences that asked for them; returns those of beams."""
    candidates: dict[Sequence, TokenLogprobs] = {}
    offset = 0
    for sequence, count in zip(step.sequences, result.num_sampled, strict=True):
        if sequence.request.search is not None:
            if count and (known := result.logprobs[offset]) is not None:
                candidates[sequence] = known
        elif sequence.request.params.logprobs is not None and sequence.status is not Status.FINISHED:
            sequence.logprobs += result.logprobs[offset : offset + count]
        offset += count
    return candidates
