"""One sequence of an answer: its text read by the parsers, into the parts that the front shows."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from services.gateway.http.parsing.parts import CallArguments, CallBegun, Part, Reasoning
from services.gateway.http.parsing.registry import OutputParser
from services.gateway.streams.stream import Stream, StreamDelta
from shared.reasoning import ReasoningMeter


class AnswerReader:
    """Feeds one sequence's text to its parser and counts the calls in it.

    A message is what its deltas add up to, because both are made of the same parts.
    """

    def __init__(
        self, parser: OutputParser, *, parallel: bool, reasoning: bool, meter: ReasoningMeter | None = None
    ) -> None:
        """`parallel`: whether the answer may have several calls, `reasoning`: whether it has the reasoning; `meter`:
        what counts its tokens."""
        self._meter = meter
        self._parser = parser
        self._parallel = parallel
        self._reasoning = reasoning
        self.num_calls = 0

    def take(self, stream: Stream, delta: StreamDelta) -> list[Part]:
        """The parts of an output, whose tokens of reasoning the stream counts."""
        if self._meter is not None:
            before = self._meter.num_tokens
            self._meter.advance(delta.token_ids)
            stream.num_reasoning_tokens = (stream.num_reasoning_tokens or 0) + self._meter.num_tokens - before
        return self.feed("".join(delta.text))

    def feed(self, text: str) -> list[Part]:
        return self._allowed(self._parser.feed(text))

    def finish(self, *, is_cut_call: bool = False) -> list[Part]:
        """`is_cut_call`: a call that was demanded has no end; without a name yet it is nothing at all."""
        parts = self._allowed(self._parser.finish())
        if is_cut_call and not self.num_calls:
            return [part for part in parts if isinstance(part, Reasoning)]
        return parts

    def _allowed(self, parts: Iterable[Part]) -> list[Part]:
        """Without what is not wanted: the calls after the first, or what the model thought."""
        found = []
        for part in parts:
            self.num_calls += isinstance(part, CallBegun)
            if isinstance(part, Reasoning) and not self._reasoning:
                continue
            if self._parallel or self.num_calls < 2 or not isinstance(part, CallBegun | CallArguments):
                found.append(part)
        return found


def call_id() -> str:
    """As OpenAI writes them; also nine or more letters and digits, as Mistral's templates want."""
    return f"call_{uuid.uuid4().hex[:24]}"
