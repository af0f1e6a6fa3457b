"""One output stream: tokens of one sequence in, what its client is to see out.  Knows no addresses and no sockets."""

from __future__ import annotations

from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.stops import StopMatcher
from shared.messages import FinishReason, LatencyBreakdown, OpenStream, SequenceText, SequenceTokens
from shared.tracing.latency import LatencyTracker, arrived, checked
from shared.tracing.phases import Phase


class StreamGapError(Exception):
    """Tokens are missing between what a stream has seen and what came."""


class TextStream:
    """The decoding state of one sequence.

    Invariant: the texts returned so far are one text, cut anywhere; how the tokens were grouped cannot be seen in it.
    """

    def __init__(self, opened: OpenStream, decoders: DecoderFactory) -> None:
        self.opened = opened
        self.num_tokens = 0
        self.num_characters = 0
        self.finish_reason: FinishReason | None = None
        self._first = True
        self._latency: LatencyBreakdown | None = None  # the last one
        self._decoder = None
        if opened.detokenize:
            self._decoder = decoders.make(
                opened.prompt_tail,
                whole_prompt=len(opened.prompt_tail) == opened.num_prompt_tokens,
                skip_special_tokens=opened.skip_special_tokens,
            )
        self._stops = StopMatcher(opened.stop, include=opened.include_stop_str_in_output) if opened.stop else None

    @property
    def stop_matched(self) -> str | None:
        """The stop string that ended this stream."""
        return self._stops.matched if self._stops else None

    def advance(
        self, tokens: SequenceTokens, now: float = 0.0, busy_since: float = 0.0, stamp: float = 0.0
    ) -> SequenceText | None:
        """Take tokens; None where they bring nothing new.  Raises StreamGapError where some are missing before them.

        The times are Unix seconds: now, since when this service has had no pause, and when these tokens were made.
        """
        num_known = self.num_tokens - tokens.offset
        if num_known < 0:
            raise StreamGapError(f"expected token {self.num_tokens}, got {tokens.offset}")
        if num_known > len(tokens.token_ids) or (num_known == len(tokens.token_ids) and not tokens.finish_reason):
            return None
        offset = self.num_tokens
        if self._stops is None and tokens.finish_reason is None:
            text = self._decode(tokens.token_ids[num_known:])
            return self._say(tokens, offset, num_known, text, self._taken_up(tokens.latency, now, busy_since))
        text = "".join(self._push_all(tokens.token_ids[num_known:], tokens.stop_token_id))
        if self.stop_matched is not None:
            self.finish_reason = FinishReason.STOP
        elif tokens.finish_reason is not None:
            text += self._flush()
            self.finish_reason = FinishReason.STOP if self.stop_matched is not None else tokens.finish_reason
        latency = tokens.latency
        if latency is None and self.finish_reason is not None and self._latency is not None:
            latency = LatencyTracker(Phase.DECODE, self._latency.stamp, self._latency).breakdown(stamp)
        return self._say(tokens, offset, num_known, text, self._taken_up(latency, now, busy_since))

    def _taken_up(self, latency: LatencyBreakdown | None, now: float, busy_since: float) -> LatencyBreakdown | None:
        """The breakdown of the tokens that are taken up now, with the hop booked.

        Where a stop string ended the sequence there is none: then the last one counts, and the time since was decoding.
        """
        if latency is None:
            return None
        self._latency = checked(latency)
        return arrived(latency, Phase.TO_DETOKENIZER, now=now, busy_since=busy_since)[0]

    def _decode(self, token_ids: list[int]) -> str:
        """The common case: the stream goes on, and no stop string is looked for."""
        self.num_tokens += len(token_ids)
        if self._decoder is None:
            return ""
        if len(token_ids) == 1:
            return self._decoder.push(token_ids[0])
        return "".join(map(self._decoder.push, token_ids))

    def _push_all(self, token_ids: list[int], stop_token_id: int | None) -> list[str]:
        """Texts of the tokens up to the one that completes a stop string; a stop token has none unless asked for."""
        texts, hidden = [], None if self.opened.include_stop_str_in_output else stop_token_id
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if self._decoder is None or (token_id == hidden and position == len(token_ids) - 1):
                continue
            texts.append(self._match(self._decoder.push(token_id)))
            if self.stop_matched is not None:
                break
        return texts

    def _match(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        return self._stops.push(text, armed=self.num_tokens > self.opened.min_tokens)

    def _flush(self) -> str:
        text = self._match(self._decoder.finish()) if self._decoder is not None else ""
        if self._stops is not None and self._stops.matched is None:
            text += self._stops.flush()
        return text

    def _say(
        self, tokens: SequenceTokens, offset: int, num_known: int, text: str, latency: LatencyBreakdown | None
    ) -> SequenceText:
        new = slice(num_known, num_known + self.num_tokens - offset)
        said = SequenceText(
            tokens.request_id,
            tokens.index,
            offset,
            self.num_characters,
            text,
            tokens.token_ids[new],
            tokens.logprobs[new] if tokens.logprobs else tokens.logprobs,
            self.finish_reason,
            self._stop_reason(tokens) if self.finish_reason is not None else "",
            self.opened.num_prompt_tokens,
            self.opened.num_cached_tokens,
            self.num_tokens,
            self.opened.prompt_logprobs if self._first else None,
            tokens.num_draft_tokens,
            tokens.num_accepted_tokens,
            latency,
            embedding=self.opened.embedding if self._first else None,
            fingerprint=self.opened.fingerprint if self._first else "",
        )
        self.num_characters += len(text)
        self._first = False
        return said

    def _stop_reason(self, tokens: SequenceTokens) -> str:
        if self.stop_matched is not None:
            return self.stop_matched
        if self.finish_reason is FinishReason.STOP and tokens.stop_token_id is not None:
            return str(tokens.stop_token_id)
        return ""
