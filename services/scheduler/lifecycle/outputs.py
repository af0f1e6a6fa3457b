"""What the core has to say to detokenizers and gateways, gathered until the shell takes it."""

from __future__ import annotations

from services.scheduler.blocks.clock import Clock
from services.scheduler.state.sequence import Request, Sequence
from shared.errors import RequestError
from shared.messages import OpenStream, RequestRejected, SequenceTokens, TokenBatch, TokenLogprobs

PROMPT_TAIL = 32  # tokens of decoding context
NONE: list[TokenLogprobs | None] = []  # no log-probabilities; never written to


class Outbound:
    """Token batches by detokenizer, rejections by gateway."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._opened: dict[str, list[OpenStream]] = {}
        self._tokens: dict[str, list[SequenceTokens]] = {}
        self._closed: dict[str, list[tuple[str, int]]] = {}
        self._rejections: list[tuple[str, RequestRejected]] = []

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
            prompt_logprobs=[None, *sequence.prompt_logprobs] if sequence.wants_prompt_logprobs else None,
            embedding=sequence.embedding,
            fingerprint=request.fingerprint,
        )
        self._opened.setdefault(request.detokenizer, []).append(stream)

    def emit(self, sequence: Sequence) -> None:
        """Send the tokens that were not sent yet, opening the stream before the first."""
        request = sequence.request
        if not request.detokenizer:
            return
        offset = sequence.num_emitted
        if offset == 0:
            self.open(sequence)
        clock = sequence.clock
        tokens = SequenceTokens(
            request.header.request_id,
            sequence.index,
            offset,
            sequence.token_ids[request.num_prompt_tokens + offset :],
            sequence.logprobs[offset:] if sequence.logprobs else NONE,
            sequence.finish_reason,
            sequence.stop_token_id,
            sequence.num_draft_tokens,
            sequence.num_accepted_tokens,
            clock.told(self._clock.now) if clock is not None and clock.is_due else None,
        )
        sequence.num_emitted = len(sequence.token_ids) - request.num_prompt_tokens
        if request.detokenizer in self._tokens:
            self._tokens[request.detokenizer].append(tokens)
        else:
            self._tokens[request.detokenizer] = [tokens]

    def emit_again(self, request: Request) -> None:
        """Tell a detokenizer everything from the start; what the client has already, its gateway drops.  Of a beam
        search there is nothing to tell before its end."""
        if request.search is not None and not request.is_finished:
            return
        for sequence in request.sequences:
            if sequence.num_output_tokens:
                sequence.num_emitted = 0
                if sequence.clock is not None:
                    sequence.clock.retell()
                self.emit(sequence)

    def close(self, sequence: Sequence) -> None:
        """Tell the detokenizer to forget a stream."""
        if sequence.request.detokenizer and sequence.num_emitted:
            key = (sequence.request.request_id, sequence.index)
            self._closed.setdefault(sequence.request.detokenizer, []).append(key)

    def reject(self, gateway: str, request_id: str, error: RequestError) -> None:
        rejection = RequestRejected(request_id, error.code, str(error), error.field, error.retry_after_ms, error.reason)
        self._rejections.append((gateway, rejection))

    def fail(self, request: Request, error: RequestError) -> None:
        """End a request that was accepted before, with a status."""
        self.reject(request.header.gateway, request.request_id, error)

    def take_batches(self) -> dict[str, TokenBatch]:
        """One batch per detokenizer since the last call."""
        destinations = self._opened.keys() | self._tokens.keys() | self._closed.keys()
        batches = {
            address: TokenBatch(
                self._opened.get(address, []),
                self._tokens.get(address, []),
                self._closed.get(address, []),
                self._clock.now,
            )
            for address in sorted(destinations)
        }
        self._opened, self._tokens, self._closed = {}, {}, {}
        return batches

    def take_rejections(self) -> list[tuple[str, RequestRejected]]:
        taken, self._rejections = self._rejections, []
        return taken
