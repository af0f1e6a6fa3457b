"""One open stream: what it asked for, what it has been sent, and what still waits for its client.

Pure but for one future a stream, on which that stream's own sender waits: nothing here blocks another stream.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from services.gateway.streams.latency import StreamLatency
from shared.clocks.clock import steady_time
from shared.errors import ProtocolError, RequestError
from shared.messages import AttachRequest, RequestHeader, SequenceText, TokenizeRequest, TokenLogprobs
from shared.packing import pack_tokens

MAX_DELTA_BYTES = 256 << 10  # well within the 4 MiB that gRPC clients accept by default
BYTES_PER_ID = 4
BYTES_PER_LOGPROB = 12


class StreamDelta(msgspec.Struct):
    """New output of one sequence; grows while its client is behind, so that one message carries much of it."""

    index: int
    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    prompt_logprobs: list[TokenLogprobs | None] = []
    num_bytes: int = 0  # about what it takes on the wire
    end: SequenceText | None = None  # the news that ended the sequence

    @property
    def empty(self) -> bool:
        """Whether it is empty to a client that wants no token ids."""
        return not (self.text or self.logprobs or self.prompt_logprobs or self.end)

    def extend(self, other: StreamDelta) -> None:
        """By output that follows, as a whole answer gathers it."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.prompt_logprobs += other.prompt_logprobs
        self.end = other.end or self.end

    def add(self, text: str, token_ids: list[int]) -> None:
        if text:
            self.text.append(text)
        self.token_ids += token_ids
        self.num_bytes += len(text) + BYTES_PER_ID * len(token_ids)

    def add_logprobs(
        self, logprobs: list[TokenLogprobs | None], prompt_logprobs: list[TokenLogprobs | None] | None
    ) -> None:
        """In order, the prompt's before the first of the output's."""
        self.logprobs += logprobs
        self.prompt_logprobs += prompt_logprobs or []
        entries = (*logprobs, *(prompt_logprobs or ()))
        self.num_bytes += BYTES_PER_LOGPROB * sum(len(entry.token_ids) for entry in entries if entry)


class Position(msgspec.Struct, frozen=True):
    """How much of a sequence a client has, from an earlier call."""

    num_tokens: int = 0
    num_chars: int = 0


class OutputLostError(ProtocolError):
    """Something between what a stream has and what came is missing; raised once for each hole."""


class SequenceJournal:
    """What one sequence has put out.  Invariant: it equals what was queued for the client, in order, once."""

    def __init__(self, index: int, has: Position | None = None) -> None:
        self.index = index
        self._has = has or Position()  # what its client had before this call
        self.token_ids = array("i")
        self.num_chars = 0
        self.num_cached_tokens = -1  # as the first news said, whatever becomes of the sequence later
        self.finished = False
        self._has_hole = False
        self._growing: StreamDelta | None = None  # the last one that is queued

    def accept(self, news: SequenceText, queue: list[StreamDelta]) -> bool:
        """Queue the part of `news` that is new, if any: False where all of it was sent before.

        What the client has from an earlier call is not sent again.  The rest goes into a delta that still waits there,
        while that is no larger than one message should be.  Raises
        OutputLostError where something between the journal and `news` is missing.
        """
        if self.finished:
            return False
        seen_tokens = len(self.token_ids) - news.token_offset
        seen_chars = self.num_chars - news.text_offset
        if seen_tokens < 0 or seen_chars < 0:
            return self._note_hole(news)
        self._has_hole = False
        token_ids = news.token_ids[seen_tokens:] if seen_tokens else news.token_ids
        new_ids = packed(token_ids)
        text = news.text[seen_chars:] if seen_chars else news.text
        self.finished = news.finish_reason is not None
        if not (token_ids or text or self.finished):
            return False
        if self.num_cached_tokens < 0:
            self.num_cached_tokens = news.num_cached_tokens
        num_had = max(0, self._has.num_tokens - len(self.token_ids))
        shown, shown_ids = text[max(0, self._has.num_chars - self.num_chars) :], token_ids[num_had:]
        if shown or shown_ids or self.finished:
            delta = self._delta(queue)
            delta.add(shown, shown_ids)
            if news.logprobs or news.prompt_logprobs:
                has_prompt = self.token_ids or self._has.num_tokens
                delta.add_logprobs(news.logprobs[seen_tokens + num_had :], None if has_prompt else news.prompt_logprobs)
            if self.finished:
                delta.end = self._end(news)
        self.token_ids.extend(new_ids)
        self.num_chars += len(text)
        return True

    def _delta(self, queue: list[StreamDelta]) -> StreamDelta:
        if self._growing is None or self._growing.num_bytes > MAX_DELTA_BYTES:
            self._growing = StreamDelta(self.index)
            queue.append(self._growing)
        return self._growing

    def _note_hole(self, news: SequenceText) -> bool:
        if self._has_hole:
            return False
        self._has_hole = True
        raise OutputLostError(
            f"at token {news.token_offset} and character {news.text_offset}, "
            f"expected {len(self.token_ids)} and {self.num_chars}"
        )

    def _end(self, news: SequenceText) -> SequenceText:
        if news.num_cached_tokens == self.num_cached_tokens:
            return news
        return msgspec.structs.replace(news, num_cached_tokens=self.num_cached_tokens)

    def taken(self) -> None:
        """What was queued is on its way: what comes next begins a new delta."""
        self._growing = None


class Stream:
    """One Generate call: its request, a journal per sequence, and the deltas that its sender has not taken."""

    def __init__(self, request: TokenizeRequest, tokenizer: str, has: Sequence[Position] | None = None) -> None:
        """`has`: what the client has of each sequence, where it asked for this before."""
        self.request = request
        self.is_return = has is not None
        self.tokenizer = tokenizer  # address of the replica that got the request, and gets its abort; "": none has it
        self.is_resumed = False  # the service that had it may be gone: another is to go on behind what has come
        num_sequences = max(1, request.params.n)
        positions = [*(has or ()), *[Position()] * num_sequences]
        self.sequences = [SequenceJournal(index, positions[index]) for index in range(num_sequences)]
        self.error: RequestError | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_draft_tokens = 0  # of the sequences that have finished, as the next
        self.num_accepted_tokens = 0
        self.num_reasoning_tokens: int | None = None  # as its reader counts them; None where they are not told apart
        self.finish_reason = ""  # of the sequence that ended last
        self.fingerprint = ""  # of the worker that began it, as the first news said
        self.latency: StreamLatency | None = None  # None where its time is not tracked
        self.on_output: Callable[[], None] = lambda: None  # called whenever the sender takes output
        self._pending: list[StreamDelta] = []
        self.is_heard = False  # whether any output came, new or not
        self._is_awake = False
        self._sleep: asyncio.Future[None] | None = None  # of the sender, until there is something for it to look at
        self._is_writing = False  # what was taken
        self._woken: Callable[[], None] | None = None  # to be called once what is taken next has been written
        self._taken: Callable[[], None] | None = None  # to be called once what was taken has been written
        self._delivery: asyncio.Timeout | None = None

    @property
    def header(self) -> RequestHeader:
        return self.request.header

    @property
    def time_left(self) -> float | None:
        """Seconds until the call's deadline."""
        return None if self.header.deadline is None else self.header.deadline - steady_time()

    def readdress(self, gateway: str) -> None:
        """The gateway is reached elsewhere now: what is sent from here on says so."""
        header = msgspec.structs.replace(self.header, gateway=gateway)
        self.request = msgspec.structs.replace(self.request, header=header)

    @property
    def next_request(self) -> TokenizeRequest | AttachRequest:
        """What to send: the request, and where it is resumed what has come of it so far."""
        if self.is_return and not self.is_resumed:
            return AttachRequest(
                self.header.request_id, self.header.gateway, self.header.deadline, time_left=self.time_left
            )
        header = msgspec.structs.replace(self.header, time_left=self.time_left)
        request = msgspec.structs.replace(self.request, header=header)
        if not self.is_resumed:
            return request
        return msgspec.structs.replace(
            request,
            is_resumed=True,
            sent_token_ids=[b"" if s.finished else pack_tokens(s.token_ids) for s in self.sequences],
            sent_text_lengths=[sequence.num_chars for sequence in self.sequences],
            sent_finished=[sequence.finished for sequence in self.sequences],
            fingerprint=self.fingerprint,
        )

    @property
    def answered(self) -> bool:
        """Whether anything came back; until then the request may be sent again."""
        return any(sequence.token_ids or sequence.finished for sequence in self.sequences)

    @property
    def finished(self) -> bool:
        for sequence in self.sequences:  # noqa: SIM110 - asked for each message; a loop takes half the time of `all`
            if not sequence.finished:
                return False
        return True

    @property
    def ended(self) -> bool:
        """Whether no more output will come."""
        return self.finished or self.error is not None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def accept(self, news: SequenceText) -> None:
        """Queue what is new of `news`, to be sent when the stream is woken.  Raises OutputLostError where something
        before it is missing, ProtocolError where it is none of this stream's."""
        if not 0 <= news.index < len(self.sequences):
            raise ProtocolError(f"stream {news.request_id} has no sequence {news.index}")
        if self.error is not None or not self.sequences[news.index].accept(news, self._pending):
            return
        self.num_prompt_tokens = news.num_prompt_tokens or self.num_prompt_tokens
        self.fingerprint = self.fingerprint or news.fingerprint
        self.num_cached_tokens = max(self.num_cached_tokens, news.num_cached_tokens)
        if news.finish_reason is not None:
            self.finish_reason = str(news.finish_reason)
            self.num_draft_tokens += news.num_draft_tokens
            self.num_accepted_tokens += news.num_accepted_tokens

    def wake(self, sent: Callable[[], None]) -> bool:
        """Let the sender take what is queued, as `services.gateway.streams.flush_throttle` has it."""
        if not self._pending:
            return False
        self._awake()
        if self._is_writing:
            return False
        self._woken = sent
        return True

    def fail(self, error: RequestError) -> None:
        """End the stream with a status; what was queued before is still sent, the first error wins."""
        if not self.ended:
            self.error = error
            self._awake()

    def _awake(self) -> None:
        self._is_awake = True
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    @property
    def num_unread(self) -> int:
        """About how many bytes wait for the sender."""
        num_bytes = 0
        for delta in self._pending:
            num_bytes += delta.num_bytes
        return num_bytes

    def overrun(self, error: RequestError) -> None:
        """End the stream with a status at once: what is queued is thrown away, and its sender does not wait for a
        reader that may never come."""
        self.error = error
        self._pending.clear()
        self._awake()
        if self._delivery is not None and not self._delivery.expired():
            self._delivery.reschedule(asyncio.get_running_loop().time())

    async def deliver(self, sending: Awaitable[None]) -> None:
        """Await what sends this stream's output, to its end or until it is overrun."""
        try:
            async with asyncio.timeout(None) as self._delivery:
                await sending
        except TimeoutError:
            if self.error is None:
                raise

    async def before_writing(self, work: Awaitable[None]) -> None:
        """Await what has to be done between taking output and writing it: that is none of the client's time."""
        if self.latency is not None:
            self.latency.write_ended()
        await work
        if self.latency is not None:
            self.latency.write_began()

    async def take(self) -> list[StreamDelta]:
        """Wait until there is output and the stream is woken, then take all of it, in few deltas.  Empty where the
        stream has ended."""
        self._is_writing = False
        if self._taken is not None:
            self._taken()
            self._taken = None
        if self.latency is not None:
            self.latency.write_ended()
        while not (self._pending and self._is_awake) and (self._pending or not self.ended):
            self._is_awake = False
            self._sleep = asyncio.get_running_loop().create_future()
            await self._sleep
        deltas, self._pending = self._pending, []
        self._is_writing, self._taken, self._woken = bool(deltas), self._woken, None
        for sequence in self.sequences:
            sequence.taken()
        if deltas:
            self.on_output()
        if self.latency is not None and deltas:
            self.latency.write_began()
        return deltas


def packed(token_ids: list[int]) -> array[int]:
    """As they are kept.  Raises ProtocolError where one is none that any vocabulary has."""
    try:
        return array("i", token_ids)
    except OverflowError as error:
        raise ProtocolError(f"a token id is none: {error}") from error
