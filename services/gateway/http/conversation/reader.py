"""One sequence of an answer: its text read by the parsers, into the parts that the front shows."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, Part, Reasoning
from services.gateway.http.parsing.registry import OutputParser
from services.gateway.streams.stream import Stream, StreamDelta
from shared.messages import FinishReason, SequenceText
from shared.requests.reasoning import ReasoningMeter


class AnswerReader:
    """Feeds one sequence's text to its parser and counts the calls in it.

    A message is what its deltas add up to, because both are made of the same parts.
    """

    def __init__(
        self,
        parser: OutputParser,
        *,
        parallel: bool,
        reasoning: bool,
        demands_call: bool = False,
        meter: ReasoningMeter | None = None,
        begun: Iterable[Part] = (),
    ) -> None:
        """`parallel`: whether the answer may have several calls, `reasoning`: whether it has the reasoning;
        `demands_call`: whether it has to have a call; `meter`: what counts its tokens of reasoning; `begun`: what the
        parser has found in a call's beginning that is part of the prompt, such as the call's name."""
        self._meter = meter
        self._parser = parser
        self._parallel = parallel
        self._reasoning = reasoning
        self._demands_call = demands_call
        self._begun = list(begun)
        self.num_calls = 0

    def take(self, stream: Stream, delta: StreamDelta) -> list[Part]:
        """The parts of an output, all that are left with the last; the stream counts its tokens of reasoning."""
        if self._meter is not None:
            before = self._meter.num_tokens
            self._meter.advance(delta.token_ids)
            stream.num_reasoning_tokens = (stream.num_reasoning_tokens or 0) + self._meter.num_tokens - before
        parts = self.feed("".join(delta.text))
        return parts if delta.end is None else parts + self.finish(delta.end)

    def feed(self, text: str) -> list[Part]:
        """The parts of some text; with the first text those of a call that was begun for the model."""
        begun, self._begun = (self._begun, []) if text else ([], self._begun)
        return self._allowed([*begun, *self._parser.feed(text)])

    def finish(self, end: SequenceText | None = None) -> list[Part]:
        """What was held back; of a call that was demanded and cut off, without a name yet, that is nothing at all."""
        begun = [] if self._is_cut_call(end) else self._begun  # cut off before its first text
        self._begun = []
        parts = self._allowed([*begun, *self._parser.finish()])
        if self._is_cut_call(end) and not self.num_calls:
            return [part for part in parts if isinstance(part, Reasoning)]
        return parts

    def is_cut_at_once(self, output: StreamDelta) -> bool:
        """Whether a call that was demanded ended for its length at its first token, which makes no call."""
        return self._is_cut_call(output.end) and len(output.token_ids) <= 1

    def _is_cut_call(self, end: SequenceText | None) -> bool:
        """Whether a call that was demanded ended for its length."""
        return self._demands_call and end is not None and end.finish_reason is FinishReason.LENGTH

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
    """As OpenAI writes them.  A template that wants others gets others (services/tokenizer/call_ids.py)."""
    return f"call_{uuid.uuid4().hex[:24]}"
