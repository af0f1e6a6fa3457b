"""The core's messages to detokenizers and gateways, gathered until the shell takes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from services.scheduler.blocks.clock import Clock
from services.scheduler.speculation.records import DraftRecords
from services.scheduler.state.phases import TimeAccounts
from services.scheduler.state.sequence import Request, Sequence
from shared.errors import RequestError
from shared.messages import OpenStream, RequestRejected, SequenceTokens, TokenBatch, TokenLogprobs

PROMPT_TAIL = 32  # tokens of decoding context
GATHER_SECONDS = 1.0  # for which tokens wait for others, of a request whose client reads them all at its end
NONE: list[TokenLogprobs | None] = []  # no log-probabilities; never written to


class Outbound:
    """Token batches by detokenizer, rejections by gateway; and the output of sequences that is no token."""

    def __init__(self, accounts: TimeAccounts | None = None, records: DraftRecords | None = None) -> None:
        self._accounts = TimeAccounts(Clock()) if accounts is None else accounts
        self._clocks = self._accounts.sequences
        self._drafted = {} if records is None else records.by_sequence
        self._prompt_logprobs: dict[Sequence, list[TokenLogprobs | None]] = {}
        self._embeddings: dict[Sequence, bytes] = {}
        self._sent_at: dict[Sequence, float] = {}  # tokens of those that gather them
        self._batches: defaultdict[str, TokenBatch] = defaultdict(_empty_batch)  # by detokenizer
        self._rejections: list[tuple[str, RequestRejected]] = []

    # -- what goes out with the first token

    def take_prompt_logprobs(self, sequence: Sequence, start: int, logprobs: Iterable[TokenLogprobs | None]) -> None:
        """Those of the tokens behind the first `start`; what is computed again after a preemption takes its place."""
        known = self._prompt_logprobs.setdefault(sequence, [])
        known[start:] = logprobs

    def take_embedding(self, sequence: Sequence, embedding: bytes) -> None:
        self._embeddings[sequence] = embedding

    @property
    def firsts(self) -> Iterable[Sequence]:
        """The sequences of which there is such output."""
        return (*self._prompt_logprobs, *self._embeddings)

    def copy(self, sequence: Sequence, to: Sequence) -> None:
        if sequence in self._prompt_logprobs:
            self._prompt_logprobs[to] = list(self._prompt_logprobs[sequence])
        if sequence in self._embeddings:
            self._embeddings[to] = self._embeddings[sequence]

    def forget(self, sequence: Sequence) -> None:
        self._prompt_logprobs.pop(sequence, None)
        self._embeddings.pop(sequence, None)
        self._sent_at.pop(sequence, None)

    # -- streams

    def open(self, sequence: Sequence) -> None:
        """Announce a stream before its first token."""
        request, params = sequence.request, sequence.request.params
        if not request.detokenizer:
            return
        stream = OpenStream(
            header=request.header,
            index=sequence.index,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt_tail=request.prompt_token_ids[-PROMPT_TAIL:],
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            detokenize=params.detokenize,
            min_tokens=params.min_tokens,
            num_cached_tokens=max(0, sequence.num_cached_tokens),
            prompt_logprobs=self._logprobs_of_prompt(sequence),
            embedding=self._embeddings.get(sequence),
            fingerprint=request.fingerprint,
        )
        self._batches[request.detokenizer].opened.append(stream)

    def _logprobs_of_prompt(self, sequence: Sequence) -> list[TokenLogprobs | None] | None:
        """The log-probabilities of its prompt, where it asks for them; the first token has none."""
        return [None, *self._prompt_logprobs.get(sequence, ())] if sequence.wants_prompt_logprobs else None

    def is_due(self, sequence: Sequence) -> bool:
        """Whether the gathered tokens of a sequence that goes on are to be sent now; then they must be."""
        now = self._accounts.clock.now
        if now - self._sent_at.get(sequence, -GATHER_SECONDS) < GATHER_SECONDS:
            return False
        self._sent_at[sequence] = now
        return True

    def emit(self, sequence: Sequence) -> None:
        """Send the tokens that were not sent yet, opening the stream before the first."""
        request = sequence.request
        if not request.detokenizer:
            return
        offset, token_ids = sequence.num_emitted, sequence.token_ids
        if offset == 0:
            self.open(sequence)
        clock = self._clocks.get(sequence)
        num_drafted = num_accepted = 0
        if self._drafted and (record := self._drafted.get(sequence)) is not None:
            num_drafted, num_accepted = record.num_draft_tokens, record.num_accepted_tokens
        tokens = SequenceTokens(
            request.header.request_id,
            sequence.index,
            offset,
            token_ids[request.num_prompt_tokens + offset :],
            sequence.logprobs[offset:] if sequence.logprobs else NONE,
            sequence.finish_reason,
            sequence.stop_token_id,
            num_drafted,
            num_accepted,
            clock.told(self._accounts.clock.now) if clock is not None and clock.is_due else None,
        )
        sequence.num_emitted = len(token_ids) - request.num_prompt_tokens
        self._batches[request.detokenizer].sequences.append(tokens)

    def emit_again(self, request: Request) -> None:
        """Send a detokenizer all output from the start; the gateway drops what the client has already.  A beam search
        has no output before its end."""
        if request.search is not None and not request.is_finished:
            return
        for sequence in request.sequences:
            if sequence.num_output_tokens:
                sequence.num_emitted = 0
                self._accounts.retell(sequence)
                self.emit(sequence)

    def close(self, sequence: Sequence) -> None:
        """Have the detokenizer forget a stream."""
        if sequence.request.detokenizer and sequence.num_emitted:
            self._batches[sequence.request.detokenizer].closed.append((sequence.request.request_id, sequence.index))

    def reject(self, gateway: str, request_id: str, error: RequestError) -> None:
        rejection = RequestRejected(request_id, error.code, str(error), error.field, error.retry_after_ms, error.reason)
        self._rejections.append((gateway, rejection))

    def take_batches(self) -> dict[str, TokenBatch]:
        """One batch per detokenizer since the last call."""
        taken, self._batches = self._batches, defaultdict(_empty_batch)
        now = self._accounts.clock.now
        return {address: msgspec.structs.replace(taken[address], stamp=now) for address in sorted(taken)}

    def take_rejections(self) -> list[tuple[str, RequestRejected]]:
        taken, self._rejections = self._rejections, []
        return taken


def _empty_batch() -> TokenBatch:
    return TokenBatch([], [], [])
