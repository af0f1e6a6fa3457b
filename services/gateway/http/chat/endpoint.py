"""/v1/chat/completions: a chat in, the assistant's next message out, n times."""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation.checks import check_n
from services.gateway.http.answers.answer import UsageOptions, finish_reason, identity
from services.gateway.http.answers.events import DONE, EventResponse, Events, WholeResponse, event
from services.gateway.http.answers.logprobs import Entry, TokenTexts, chat_logprobs, ids_in, prompt_logprobs
from services.gateway.http.answers.objects import (
    PromptLogprobs,
    encode,
    fingerprint_of,
    given,
    stop_reason,
)
from services.gateway.http.chat.answer import DeltaBuilder, message_of
from services.gateway.http.chat.objects import (
    AnswerMessage,
    ChatBody,
    ChatChoice,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    MessageDelta,
)
from services.gateway.http.chat.options import begins_a_message, echoed, given_prompt, variables_of
from services.gateway.http.conversation.form import Conversation
from services.gateway.http.conversation.prompt import ToolUse, read_messages
from services.gateway.http.conversation.reader import AnswerReader
from services.gateway.http.parsing.reading.parts import Part
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.reading import field_error
from services.gateway.http.requests.returning import Bookmark, Rest, positions_of
from services.gateway.http.requests.sampling import read_beam, refuse_impossible, sampling_params
from services.gateway.http.requests.thinking import thinking_budget
from services.gateway.streams.stream import Position, Stream, StreamDelta
from shared.messages import SequenceText, TokenizeRequest


class Chats:
    """The endpoint."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def post(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, ChatBody)
        gate = self._gate.choose(body.model)
        await gate.formats.learn()
        call = ChatCall(gate, body)
        has = positions_of(request, call.n) if body.stream else None
        asked = await call.request(request)
        headers = {"x-request-id": asked.header.request_id}
        if body.stream:
            return EventResponse(lambda events: ChatStream(call, asked, has).write(events), headers)
        return WholeResponse(lambda: call.answer(asked), headers)


class ChatCall:
    """One request as it was asked.  Raises RequestError where it cannot be served."""

    def __init__(self, gate: Gate, body: ChatBody) -> None:
        self.prompt_token_ids = given_prompt(body)  # where they are given, and later where the answer tells of them
        refuse_impossible(body, served=("kv_transfer_params",) if self.prompt_token_ids else ())
        _check(body)
        self.gate = gate
        self.body = body
        self.identity = identity("chatcmpl", gate.model_name(body.model))
        self.texts = TokenTexts(gate.vocabulary, as_ids=gate.names_ids(body.return_tokens_as_token_ids))
        self.n = 1 if body.n is None else body.n
        self.usage = UsageOptions(body, gate.settings.gateway)
        variables, messages = variables_of(body), read_messages(body.messages)
        self.conversation = Conversation(
            messages=messages,
            tools=ToolUse(
                gate.formats,
                body.tools or [],
                body.tool_choice,
                parallel=body.parallel_tool_calls is not False,
                variables=variables,
                said=messages,
            ),
            variables=variables,
            begins_a_message=begins_a_message(body),
            continues_the_last=bool(body.continue_final_message),
            shows_reasoning=body.include_reasoning is not False,
            thinking=thinking_budget(gate.formats, body.thinking_token_budget, body.chat_template_kwargs),
        )
        self.shown = echoed(body, messages)
        check_n(self.n, gate.settings.scheduling.max_n)

    async def request(self, request: Request) -> TokenizeRequest:
        """What the tokenizer is asked; a prompt that the answer tells of is tokenized here already."""
        body = self.body
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        conversation = self.conversation
        params = sampling_params(
            body,
            closes=self.gate.closes_formats,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            beam=read_beam(body, body.best_of),
            **conversation.sampling,
        )
        header = self.gate.header(request, label=body.request_id, priority=body.priority)
        params = self.gate.seeded(params, request, header)
        options = conversation.options
        needs_ids = body.return_token_ids or body.prompt_logprobs is not None or body.truncate_prompt_tokens is not None
        if not (self.prompt_token_ids or needs_ids):
            return TokenizeRequest(header, params, chat=conversation.messages, chat_options=options)
        ids = self.gate.truncate(
            self.prompt_token_ids or await self.gate.encode(request, chat=conversation.messages, options=options),
            body.truncate_prompt_tokens,
            body.truncation_side,
        )
        self.prompt_token_ids = ids
        params = self.gate.up_to_the_end(params, len(ids))
        return TokenizeRequest(header, params, token_ids=self.gate.pack(ids))

    def reader(self) -> AnswerReader:
        """A reader for one sequence."""
        return self.conversation.reader(self.gate.formats)

    async def answer(self, asked: TokenizeRequest) -> bytes:
        """The whole answer as JSON."""
        outputs = [StreamDelta(index) for index in range(self.n)]
        readers = [self.reader() for _ in range(self.n)]
        parts: list[list[Part]] = [[] for _ in range(self.n)]

        async def consume(_: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            for delta in deltas:
                output, reader = outputs[delta.index], readers[delta.index]
                output.extend(delta)
                is_nothing = reader.is_cut_at_once(output)
                parts[delta.index] += reader.finish(output.end) if is_nothing else reader.take(stream, delta)

        (stream,) = await self.gate.run([asked], consume)
        entries = outputs[0].prompt_logprobs
        await self.texts.learn(ids_in(outputs, tells_output=bool(self.body.logprobs)))
        choices = [
            self._choice(stream, output, message_of(found, self.shown), reader)
            for output, found, reader in zip(outputs, parts, readers, strict=True)
        ]
        prompt = prompt_logprobs(entries, self.texts) if self.body.prompt_logprobs is not None else None
        ids = self.prompt_token_ids if self.body.return_token_ids else None
        more = {"prompt_logprobs": prompt, "prompt_token_ids": ids, **self.usage.whole([stream])}
        return encode(self.completion(choices, stream, **more))

    def completion(self, choices: list[Choice], stream: Stream, **more: object) -> ChatCompletion[Choice]:
        return ChatCompletion(
            **self.identity,
            choices=choices,
            system_fingerprint=fingerprint_of([stream]),
            **more,  # type: ignore[arg-type]
        )

    def _choice(self, stream: Stream, one: StreamDelta, message: AnswerMessage, reader: AnswerReader) -> ChatChoice:
        return ChatChoice(
            index=one.index,
            message=message,
            logprobs=self.logprobs(one.token_ids, one.logprobs),
            finish_reason=self.finish_reason(one.end, reader),
            stop_reason=stop_reason(stream, one.end.stop_reason) if one.end else None,
            token_ids=one.token_ids if self.body.return_token_ids else None,
        )

    def finish_reason(self, end: SequenceText | None, reader: AnswerReader) -> str | None:
        """A model that ended after calling waits for the answers; where it had to call, it has just ended."""
        reason = finish_reason(end)
        return "tool_calls" if reason == "stop" and reader.num_calls and not self.conversation.tools.named else reason

    def logprobs(self, token_ids: list[int], entries: list[Entry]) -> ChoiceLogprobs | None:
        if not self.body.logprobs:
            return None
        top = None if self.body.logprob_token_ids else self.body.top_logprobs or 0
        return ChoiceLogprobs(chat_logprobs(token_ids, entries, self.texts, top=top))


class ChatStream:
    """One request's answer as events."""

    def __init__(self, call: ChatCall, asked: TokenizeRequest, has: list[Position] | None = None) -> None:
        """`has`: what of each sequence a client has that comes back."""
        self._call = call
        self._asked = asked
        self._everything = (
            None if has is None else [[Position()] * call.n]
        )  # is sent again, to be parsed from the start
        self._bookmark = Bookmark(call.n, has, is_kept=asked.header.is_kept)
        self._has_told_prompt = False
        self._sequences = [
            SequenceEvents(call, index, Position() if has is None else has[index]) for index in range(call.n)
        ]

    async def write(self, events: Events) -> None:
        call = self._call

        async def consume(_: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            if call.body.logprobs or call.body.prompt_logprobs is not None:  # tokens are called by their texts
                wanted = ids_in(deltas, tells_output=bool(call.body.logprobs))
                await stream.before_writing(call.texts.learn(wanted))
            await events.write(b"".join(self._events(stream, delta) for delta in deltas))

        (stream,) = await call.gate.run([self._asked], consume, self._everything)
        if last := call.usage.last([stream]):
            await events.write(event(encode(self._object([], stream, **last))))
        await events.write(DONE)

    def _events(self, stream: Stream, delta: StreamDelta) -> bytes:
        """One for each choice; the last has the id, since only with that the client has all of the delta."""
        new = self._sequences[delta.index].new(stream, delta)
        if new is None:
            return b""
        self._bookmark.add(delta.index, new)
        prompt = prompt_logprobs(new.prompt_logprobs, self._call.texts)
        chunks = []
        for choice in self._sequences[delta.index].choices(stream, new):
            chunks.append(self._chunk([choice], stream, prompt))
            prompt = []
        if chunks:
            chunks[-1] = self._bookmark.line + chunks[-1]
        return b"".join(chunks)

    def _chunk(self, choices: list[ChunkChoice], stream: Stream, prompt: PromptLogprobs) -> bytes:
        usage = self._call.usage.now([stream], has_output=choices[0].delta.role is UNSET)
        ids = given(self._call.prompt_token_ids, self._call.body.return_token_ids and not self._has_told_prompt)
        self._has_told_prompt = True
        more = {"usage": usage, "prompt_logprobs": given(prompt, prompt), "prompt_token_ids": ids}
        return event(encode(self._object(choices, stream, **more)))

    def _object(self, choices: list[ChunkChoice], stream: Stream, **more: object) -> ChatCompletion[ChunkChoice]:
        return self._call.completion(choices, stream, object="chat.completion.chunk", **more)


class SequenceEvents:
    """What one sequence's output becomes in a stream."""

    def __init__(self, call: ChatCall, index: int, has: Position) -> None:
        """`has`: what a client has of it that comes back."""
        self._call = call
        self._index = index
        self._rest = Rest(has)
        self._reader = call.reader()
        self._builder = DeltaBuilder()
        self._begun = False
        self._token_ids: list[int] = []  # whose log-probabilities no event has said yet
        self._entries: list[Entry] = []

    def new(self, stream: Stream, delta: StreamDelta) -> StreamDelta | None:
        """What of `delta` the client has not; the rest is parsed, and not sent again."""
        had, new = self._rest.split(delta)
        if had is not None:
            self._builder.deltas(self._reader.take(stream, had))
            self._begun = True
        return new

    def choices(self, stream: Stream, delta: StreamDelta) -> list[ChunkChoice]:
        """The choices of the events for `delta`, one event each."""
        call = self._call
        is_nothing = not self._begun and self._reader.is_cut_at_once(delta)
        deltas = self._builder.deltas(
            self._reader.finish(delta.end) if is_nothing else self._reader.take(stream, delta)
        )
        if not self._begun:
            self._begun = True
            deltas.insert(0, MessageDelta(role="assistant", content=call.shown))
        if not deltas and (call.body.return_token_ids or delta.end is not None):
            deltas.append(MessageDelta())
        self._token_ids += delta.token_ids
        self._entries += delta.logprobs
        choices = [ChunkChoice(index=self._index, delta=one) for one in deltas]
        if choices:
            self._complete(choices[-1], stream, delta)
        return choices

    def _complete(self, last: ChunkChoice, stream: Stream, delta: StreamDelta) -> None:
        """The last event of a delta carries what is said once."""
        call = self._call
        if call.body.logprobs and self._entries:
            last.logprobs = call.logprobs(self._token_ids, self._entries)
            self._token_ids, self._entries = [], []
        last.token_ids = given(delta.token_ids, call.body.return_token_ids)
        if delta.end is not None:
            last.finish_reason = call.finish_reason(delta.end, self._reader)
            last.stop_reason = stop_reason(stream, delta.end.stop_reason)


def _check(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise field_error("top_logprobs", "can only be given with logprobs")
    if body.add_special_tokens:
        raise field_error("add_special_tokens", "cannot be true in a chat: the chat template writes the special tokens")
    if not body.use_beam_search and body.best_of not in (None, body.n or 1):
        raise field_error("best_of", f"is for completions; in a chat it can only be n={body.n or 1}")
