"""/v1/completions: prompts in, each continued n times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation.checks import check_n
from services.gateway.http.answers.answer import UsageOptions, finish_reason, identity
from services.gateway.http.answers.events import DONE, EventResponse, Events, WholeResponse, event
from services.gateway.http.answers.logprobs import Entry, TokenTexts, ids_in, legacy_logprobs, prompt_logprobs
from services.gateway.http.answers.objects import (
    Explanations,
    LegacyLogprobs,
    PromptLogprobs,
    TokenUsage,
    encode,
    fingerprint_of,
    stop_reason,
)
from services.gateway.http.answers.timing import RequestMetrics
from services.gateway.http.requests.fields import ClientNames, GenerationBody, Int, NotSupported, TokenId
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.prompts import Prompt, look_up, read_prompts
from services.gateway.http.requests.reading import field_error
from services.gateway.http.requests.returning import Bookmark, positions_of
from services.gateway.http.requests.sampling import read_beam, refuse_impossible, sampling_params
from services.gateway.http.requests.thinking import as_the_prompt_ends, thinking_budget
from services.gateway.streams.stream import Position, Stream, StreamDelta
from shared.messages import TokenizeRequest


class CompletionBody(GenerationBody, kw_only=True):
    client_names: ClassVar[ClientNames] = {
        "token_ids": ("prompt",),
        "label": ("request_id",),
        "n": ("best_of", "n"),
        "beam_width": ("beam_width", "best_of", "n"),
        "prompt_logprobs": ("prompt_logprobs", "logprobs"),
    }

    prompt: str | list[str | Int | list[TokenId]]  # text, token ids, or a list of either (256 at most)
    max_tokens: Int | None = None  # default 16
    logprobs: Int | None = None
    echo: bool | None = None  # the answer begins with the prompt
    best_of: Int | None = None  # sequences that are generated; the n best are the answer
    suffix: Annotated[str | None, NotSupported("inserting before a suffix")] = None
    add_special_tokens: bool | None = None  # default true: as the tokenizer does for a prompt


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole answer, or one event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    explanations: Explanations = UNSET


class Completions:
    """The endpoint."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def post(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, CompletionBody)
        gate = self._gate.choose(body.model)
        if body.thinking_token_budget is not None:
            await gate.formats.learn()
        call = CompletionCall(gate, body)
        has = positions_of(request, len(call.prompts) * call.n) if body.stream else None
        requests = await call.requests(request)
        headers = {"x-request-id": requests[0].header.request_id}
        if body.stream:
            return EventResponse(lambda events: CompletionStream(call, requests, has).write(events), headers)
        return WholeResponse(lambda: call.answer(requests), headers)


class CompletionCall:
    """One request as it was asked.  Raises RequestError where it cannot be served."""

    def __init__(self, gate: Gate, body: CompletionBody) -> None:
        refuse_impossible(body)
        self.gate = gate
        self.body = body
        self.identity = identity("cmpl", gate.model_name(body.model))
        self.texts = TokenTexts(gate.vocabulary, as_ids=gate.names_ids(body.return_tokens_as_token_ids))
        self.prompts = read_prompts(body.prompt)
        self.n = 1 if body.n is None else body.n
        self.beam = read_beam(body, body.best_of)
        self.best_of = self.n if body.best_of is None or self.beam is not None else body.best_of
        self.echo = bool(body.echo)
        self.only_prompt = self.echo and body.max_tokens == 0  # nothing new is wanted: the one token made is not shown
        self.usage = UsageOptions(body, gate.settings.gateway)
        check_n(self.best_of, gate.settings.scheduling.max_n, field="n" if body.best_of is None else "best_of")
        _check(body, self.n, self.best_of)

    async def requests(self, request: Request) -> list[TokenizeRequest]:
        """One for each prompt."""
        body = self.body
        wants_scores = self.best_of > self.n and body.logprobs is None
        asked = [count for count in (body.prompt_logprobs, body.logprobs if self.echo else None) if count is not None]
        params = sampling_params(
            body,
            closes=self.gate.closes_formats,
            n=self.best_of,
            max_tokens=1 if self.only_prompt else body.max_tokens,
            logprobs=0 if wants_scores else body.logprobs,
            prompt_logprobs=max(asked, default=None),
            beam=self.beam,
            thinking=as_the_prompt_ends(thinking_budget(self.gate.formats, body.thinking_token_budget)),
        )
        found = []
        for place, prompt in enumerate(self.prompts):
            await self._look_up(request, prompt)
            header = self.gate.header(request, label=body.request_id, priority=body.priority, place=place)
            found.append(prompt.request(self.gate, header, self.gate.seeded(params, request, header, place)))
        return found

    async def _look_up(self, request: Request, prompt: Prompt) -> None:
        """The prompt's ids where the answer tells of them, and its text where it echoes."""
        body = self.body
        tells = body.return_token_ids or body.prompt_logprobs is not None or (self.echo and body.logprobs is not None)
        await look_up(self.gate, request, body, prompt, tells=bool(tells))
        if self.echo:
            ids = prompt.token_ids or []
            prompt.shown = prompt.text or await self.gate.decode(request, ids, skip_special_tokens=False)

    async def answer(self, requests: Sequence[TokenizeRequest]) -> bytes:
        """The whole answer as JSON."""
        outputs = [[StreamDelta(index) for index in range(self.best_of)] for _ in self.prompts]

        async def consume(place: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            for delta in deltas:
                outputs[place][delta.index].extend(delta)

        streams = await self.gate.run(requests, consume)
        for place, sequences in enumerate(outputs):
            await self.learn(place, sequences)
        choices: list[CompletionChoice] = []
        for prompt, stream, sequences in zip(self.prompts, streams, outputs, strict=True):
            prompt_entries = next((one.prompt_logprobs for one in sequences if one.prompt_logprobs), [])
            for sequence in self._best(sequences):
                sequence.prompt_logprobs = prompt_entries
                choices.append(self.choice(len(choices), prompt, stream, sequence))
        return encode(self.completion(choices, streams, **self.usage.whole(streams)))

    def completion(self, choices: list[CompletionChoice], streams: Iterable[Stream], **more: object) -> Completion:
        return Completion(
            **self.identity,
            choices=choices,
            system_fingerprint=fingerprint_of(streams),
            **more,  # type: ignore[arg-type]
        )

    async def learn(self, place: int, deltas: Sequence[StreamDelta]) -> None:
        """The texts of the tokens that log-probabilities of a prompt's output name."""
        if self.body.logprobs is None and self.body.prompt_logprobs is None:
            return
        tells_output = self.body.logprobs is not None and not self.only_prompt
        wanted = ids_in(deltas, tells_output=tells_output)
        if self.echo:
            wanted.update(self.prompts[place].token_ids or [])
        await self.texts.learn(wanted)

    def _best(self, sequences: list[StreamDelta]) -> list[StreamDelta]:
        """The n of the highest log-probability per token, where more were made."""
        if self.best_of == self.n:
            return sequences
        return sorted(sequences, key=_score, reverse=True)[: self.n]

    def choice(
        self, index: int, prompt: Prompt | None, stream: Stream, delta: StreamDelta, offset: int = 0
    ) -> CompletionChoice:
        """Of a whole sequence, or of what is new of it behind `offset` characters; `prompt`: with the first of it."""
        body, text, ids, entries = self.body, "".join(delta.text), delta.token_ids, delta.logprobs
        if self.only_prompt:
            text, ids, entries = "", [], []
        entries_of_prompt = prompt_logprobs(delta.prompt_logprobs, self.texts)
        nothing = UNSET if body.stream else None  # a whole answer has vLLM's fields even where they say nothing
        return CompletionChoice(
            index=index,
            text=(prompt.shown if prompt else "") + text,
            logprobs=self.logprobs(prompt, delta.prompt_logprobs, ids, entries, offset),
            finish_reason="length" if self.only_prompt and delta.end else finish_reason(delta.end),
            stop_reason=stop_reason(stream, delta.end.stop_reason) if delta.end else None,
            prompt_logprobs=entries_of_prompt if body.prompt_logprobs is not None and entries_of_prompt else nothing,
            prompt_token_ids=prompt.token_ids if body.return_token_ids and prompt else nothing,
            token_ids=ids if body.return_token_ids else nothing,
        )

    def logprobs(
        self, prompt: Prompt | None, prompt_entries: list[Entry], ids: list[int], entries: list[Entry], offset: int = 0
    ) -> LegacyLogprobs | None:
        """Of the prompt too, where the answer echoes it and `prompt` is given."""
        if self.body.logprobs is None:
            return None
        if self.echo and prompt is not None:
            ids, entries = [*(prompt.token_ids or ()), *ids], [*prompt_entries, *entries]
            offset = -self._num_hidden(prompt)
        top = None if self.body.logprob_token_ids else self.body.logprobs
        return legacy_logprobs(ids, entries, self.texts, top=top, offset=offset)

    def _num_hidden(self, prompt: Prompt) -> int:
        """Characters of tokens that were put before the client's own prompt."""
        whole = "".join(map(self.texts.text, prompt.token_ids or ()))
        return len(whole) - len(prompt.shown) if whole.endswith(prompt.shown) else 0


class CompletionStream:
    """One request's answer as events."""

    def __init__(
        self, call: CompletionCall, requests: Sequence[TokenizeRequest], has: Sequence[Position] | None = None
    ) -> None:
        """`has`: what of each choice a client has that comes back."""
        self._call = call
        self._requests = requests
        self._has = None if has is None else [has[first : first + call.n] for first in range(0, len(has), call.n)]
        self._bookmark = Bookmark(len(requests) * call.n, has, is_kept=requests[0].header.is_kept)
        self._streams: dict[int, Stream] = {}
        self._shown = {  # characters by choice, once its first event is out
            index: len(call.prompts[index // call.n].shown) + one.num_chars
            for index, one in enumerate(has or ())
            if one != Position()
        }

    async def write(self, events: Events) -> None:
        async def consume(place: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            self._streams[place] = stream
            await stream.before_writing(self._call.learn(place, deltas))
            await events.write(b"".join(self._event(place, stream, delta) for delta in deltas))

        call = self._call
        streams = await call.gate.run(self._requests, consume, self._has)
        if last := call.usage.last(streams):
            await events.write(event(encode(call.completion([], streams, **last))))
        await events.write(DONE)

    def _event(self, place: int, stream: Stream, delta: StreamDelta) -> bytes:
        """Empty where the client would learn nothing from it."""
        call = self._call
        index = place * call.n + delta.index
        self._bookmark.add(index, delta)
        prompt = None if index in self._shown else call.prompts[place]
        if delta.empty and not call.body.return_token_ids and prompt is None:
            return b""
        choice = call.choice(index, prompt, stream, delta, self._shown.get(index, 0))
        self._shown[index] = self._shown.get(index, 0) + len(choice.text)
        completion = call.completion([choice], [stream], usage=call.usage.now(list(self._streams.values())))
        return self._bookmark.line + event(encode(completion))


def _check(body: CompletionBody, n: int, best_of: int) -> None:
    if best_of < n:
        raise field_error("best_of", f"must be at least n={n}, got {best_of}")
    if best_of > n and body.stream:
        raise field_error("best_of", "cannot be streamed: which are best is known at the end")
    if body.logprob_token_ids and body.echo and body.max_tokens == 0:
        raise field_error("logprob_token_ids", "cannot be given with echo and max_tokens=0: no token is generated")
    if body.stream and body.echo and body.logprobs is not None and n > 1:
        raise field_error("echo", "with logprobs cannot be streamed for n > 1")


def _score(sequence: StreamDelta) -> float:
    """Log-probability per token."""
    scores = [entry.logprobs[0] for entry in sequence.logprobs if entry]
    return sum(scores) / len(scores) if scores else -1e9
