"""The tokenizer's shell: requests in, tokenized requests on to the scheduler, refusals back to the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from services.tokenizer.confined.compilers import CompilerPool
from services.tokenizer.confined.encoders import HUGE_TEXT, EncoderPool
from services.tokenizer.confined.frames import EncodeJob
from services.tokenizer.confined.renderers import RendererPool
from services.tokenizer.lanes import CHARS_PER_ID, LONG_TEXT, Lane
from services.tokenizer.prompts import PromptRules, check_deadline, num_word_chars, pack_prompt
from shared.actor import MemberActor
from shared.actor.actor import Handlers
from shared.clocks.clock import steady_time
from shared.clocks.deadlines import received, sent
from shared.config import Settings
from shared.errors import RejectCode, RequestError
from shared.messages import (
    AbortRequest,
    DecodeRequest,
    DecodeResult,
    DescribeRequest,
    DescribeResult,
    EncodeRequest,
    EncodeResult,
    Fingerprint,
    Goodbye,
    Message,
    PiecesRequest,
    PiecesResult,
    Refused,
    RequestRejected,
    Roster,
    ServiceName,
    Tick,
    TokenizeRequest,
    TokenizerInbox,
)
from shared.packing import pack_tokens, unpack_tokens
from shared.processes.logging import request_logger
from shared.requests.grammar import Grammar, refusal
from shared.text.pieces import TokenPieces
from shared.text.tokenization import ModelTokenizer
from shared.tracing.latency import LatencyTracker, arrived
from shared.tracing.phases import Phase
from shared.transport import Transport

log = structlog.get_logger()

T = TypeVar("T")
Question = EncodeRequest | DecodeRequest | PiecesRequest | DescribeRequest

LONG = 0.001  # seconds
RESUMED_ALLOWANCE = 30.0  # times the usual that a stream under way may wait for a child: it was not too much before
PIECES_AT_ONCE = 4096  # tokens that are looked up until others have their turn


class Preparation:
    """A request on its way to being tokens, in the background or at once."""

    def __init__(self, request: TokenizeRequest | Question) -> None:
        self.request = request

    @property
    def request_id(self) -> str:
        return self.request.header.request_id if isinstance(self.request, TokenizeRequest) else self.request.request_id

    @property
    def gateway(self) -> str:
        return self.request.header.gateway if isinstance(self.request, TokenizeRequest) else self.request.gateway

    @property
    def generation(self) -> TokenizeRequest:
        assert isinstance(self.request, TokenizeRequest)
        return self.request

    def takes(self, again: TokenizeRequest) -> bool:
        """Whether this work serves a request that is sent again too: a gateway does that after some seconds of silence.
        Then the later one is used, which may know of output; beginning anew would take as long again, and again.

        No scheduler has had it from here, so it passes the limits of the queue yet, whatever the gateway supposes.
        """
        first = self.request
        if not isinstance(first, TokenizeRequest) or _work_of(first) != _work_of(again):
            return False
        has_output = any(again.sent_token_ids) or any(again.sent_finished)
        self.request = msgspec.structs.replace(again, is_resumed=again.is_resumed and (first.is_resumed or has_output))
        return True


def _work_of(request: TokenizeRequest) -> tuple[object, ...]:
    return request.text, request.chat, request.chat_options, request.token_ids, request.params


class TokenizerActor(MemberActor):
    """Stateless but for what is being rendered or tokenized in the background.

    Chats and long texts are prepared in tasks; each comes back through `_contained`, on the event loop and in one go,
    so that no handler can be under way then: the rule that handlers do not interleave holds for it as for messages.
    """

    service = ServiceName.TOKENIZER
    inbox_union = TokenizerInbox

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        tokenizer: ModelTokenizer,
        renderers: RendererPool | None,
        instance: str | None = None,
        text: Fingerprint | None = None,
    ) -> None:
        super().__init__(transport, settings, instance)
        self.tokenizer = tokenizer
        self.renderers = renderers
        self.compilers = CompilerPool(patience=settings.deployment.resume_timeout)
        self.rules = PromptRules(
            tokenizer,
            max_prompt_bytes=settings.gateway.max_prompt_bytes,
            max_logprobs=settings.scheduling.max_logprobs,
            max_n=settings.scheduling.max_n,
        )
        self.pieces = TokenPieces(tokenizer)
        self._text = text
        self.lane = Lane(settings.gateway.num_tokenizer_threads, "long-texts")
        self.decodings = Lane(1, "long-decodings")
        self.encoders = EncoderPool(tokenizer.tokenizer.to_str())
        self.pending: dict[str, Preparation] = {}  # by request id; those in the background that have not been aborted
        self._idle = asyncio.Event()

    def handlers(self) -> Handlers:
        return {
            TokenizeRequest: self.handle_tokenize,
            EncodeRequest: self.handle_question,
            DecodeRequest: self.handle_question,
            PiecesRequest: self.handle_question,
            DescribeRequest: self.handle_question,
            AbortRequest: self.handle_abort,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    def fingerprint(self) -> Fingerprint | None:
        return self._text

    # -- handlers

    def handle_tokenize(self, request: TokenizeRequest) -> None:
        request = msgspec.structs.replace(request, header=received(request.header))
        if request.latency is not None:  # the hop to this service is booked
            latency, _ = arrived(request.latency, Phase.TO_TOKENIZER, now=time.time(), busy_since=self.busy_since)
            request = msgspec.structs.replace(request, latency=latency)
        header, started, job = request.header, time.monotonic(), Preparation(request)
        with self._contained(job, header.trace_id):
            if not self.scheduler_is_live:
                raise RequestError("no scheduler is live", code=RejectCode.UNAVAILABLE)
            self.rules.check(request, max_input_length=self.max_input_length, now=steady_time())
            if (pending := self.pending.pop(header.request_id, None)) is not None and pending.takes(request):
                self.pending[header.request_id] = pending
                return
            if (grammar := request.params.grammar) is not None:
                self._later(job, lambda: self._compiled(request, grammar), partial(self._admit_compiled, job, started))
            elif _is_long(request):
                self._later(
                    job,
                    lambda: self._prepared(request),
                    lambda ready: self._admit(job.generation, *ready, started),
                )
            else:
                prompt = request.token_ids
                if prompt is None:
                    prompt = pack_prompt(self.tokenizer.encode(request.text or ""))
                self._admit(request, prompt, self.rules.bad_words(request.params), started)

    def handle_question(self, question: Question) -> None:
        job = Preparation(question)
        with self._contained(job):
            if isinstance(question, EncodeRequest):
                self.rules.check_encode(question)
            elif not isinstance(question, DescribeRequest):
                self.rules.check_size(len(question.token_ids), "token_ids")
            self._later(job, lambda: self._answer(question), partial(self.send, question.gateway))

    def handle_abort(self, message: AbortRequest) -> None:
        # A rendering under way is let finish, within its time limit, as a child costs more than its answer.
        self.pending.pop(message.request_id, None)
        self.send(self.scheduler, message)

    # -- the deployment's limits

    @property
    def max_model_len(self) -> int:
        return self.roster.max_model_len or self.settings.scheduling.max_model_len or self.tokenizer.context_length

    @property
    def max_input_length(self) -> int:
        """Tokens; 0 where it is not known yet."""
        return self.roster.max_input_length or self.settings.scheduling.max_input_length

    # -- the work

    async def _prompt(self, request: TokenizeRequest | EncodeRequest, *, adds_special_tokens: bool) -> list[int]:
        """Token ids of a text, or of a chat once it is rendered; of long ones elsewhere, while others go on."""
        text = request.text
        if request.chat is not None:
            assert self.renderers is not None  # the rules let no chat through where there is no template
            # The same prompt whenever and wherever a request is tokenized: its time is that of its arrival.
            now = request.header.arrival_time if isinstance(request, TokenizeRequest) else None
            text = await self.renderers.render(request.chat, request.chat_options, now, _allowance(request))
            self.rules.check_length(text, self.max_input_length, "chat")
            adds_special_tokens = False  # the template has written them
        text = text or ""
        if isinstance(request, TokenizeRequest):
            request_id, tenant = request.header.request_id, request.header.tenant
        else:
            request_id, tenant = request.request_id, request.tenant
        if len(text) > HUGE_TEXT:
            ids = unpack_tokens(await self.encoders.encode(tenant, EncodeJob(text, adds_special_tokens)))
            return self.tokenizer.with_bos(ids) if adds_special_tokens else ids
        encode = self.tokenizer.encode if adds_special_tokens else self.tokenizer.encode_plain
        return await self.lane.run(tenant, len(text), partial(self._encoded, request_id, encode, text))

    def _encoded(self, request_id: str, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """The text's ids, in any thread; none where the request has been aborted meanwhile."""
        return encode(text) if request_id in self.pending or len(text) <= LONG_TEXT else []

    async def _answer(self, question: Question) -> Message:
        match question:
            case EncodeRequest():
                ids = await self._prompt(question, adds_special_tokens=question.add_special_tokens)
                return EncodeResult(question.request_id, pack_tokens(ids))
            case DecodeRequest():
                return DecodeResult(question.request_id, await self._decoded(question))
            case PiecesRequest():
                return PiecesResult(question.request_id, await self._pieces(question))
            case DescribeRequest():
                found = [self.tokenizer.encode_plain(text) for text in question.texts]
                return DescribeResult(question.request_id, self.tokenizer.description, found)

    async def _decoded(self, request: DecodeRequest) -> str:
        def decode() -> str:
            token_ids = self.rules.unpack(request.token_ids)
            return self.tokenizer.decode(token_ids, skip_special_tokens=request.skip_special_tokens)

        return await self.decodings.run(request.tenant, CHARS_PER_ID * len(request.token_ids) // 4, decode)

    async def _pieces(self, request: PiecesRequest) -> list[bytes]:
        token_ids = self.rules.unpack(request.token_ids)
        piece = self.pieces.written if request.as_written else self.pieces.of
        pieces: list[bytes] = []
        for start in range(0, len(token_ids), PIECES_AT_ONCE):
            pieces += [piece(token_id) for token_id in token_ids[start : start + PIECES_AT_ONCE]]
            await asyncio.sleep(0)
        return pieces

    async def _prepared(self, request: TokenizeRequest) -> tuple[bytes, list[list[int]]]:
        """The request's prompt, and the tokens of the words that it does not want; of long ones elsewhere."""
        prompt, params = request.token_ids, request.params
        if prompt is None:
            prompt = pack_prompt(await self._prompt(request, adds_special_tokens=True))
        work = partial(self.rules.bad_words, params)
        return prompt, await self.lane.run(request.header.tenant, num_word_chars(params), work)

    async def _compiled(self, request: TokenizeRequest, grammar: Grammar) -> tuple[Grammar, bytes, list[list[int]]]:
        """The request's grammar as workers read it, and what `_prepared` makes.

        The grammar is waited for until the request's deadline, where that comes first.
        """
        if not self.tokenizer.defaults.eos_token_ids:
            raise refusal(grammar, "is not possible: the model has no end-of-sequence token")
        deadline = request.header.deadline
        seconds = math.inf if deadline is None else max(0.0, deadline - steady_time())
        try:
            grammar = await self.compilers.compile(grammar, _allowance(request), request.header.tenant, seconds)
        except RequestError:
            check_deadline(deadline, steady_time())
            raise
        return grammar, *await self._prepared(request)

    def _admit_compiled(self, job: Preparation, started: float, ready: tuple[Grammar, bytes, list[list[int]]]) -> None:
        (grammar, prompt, bad_words), request = ready, job.generation
        params = msgspec.structs.replace(request.params, grammar=grammar)
        self._admit(msgspec.structs.replace(request, params=params), prompt, bad_words, started)

    def _later(self, job: Preparation, work: Callable[[], Awaitable[T]], use: Callable[[T], None]) -> None:
        """Do `work` in the background, then `use` its outcome unless the request was aborted or sent anew meanwhile."""
        request_id = job.request_id

        async def run() -> None:
            with self._contained(job):
                outcome = await work()
                if self.pending.get(request_id) is job:
                    use(outcome)
            if self.pending.get(request_id) is job:
                del self.pending[request_id]
            if not self.pending:
                self._idle.set()
            self.outbox.flush()
            self._catch_up()

        self.pending[request_id] = job
        self._idle.clear()
        self.spawn(run())

    def _admit(
        self, request: TokenizeRequest, prompt_token_ids: bytes, bad_words: list[list[int]], started: float
    ) -> None:
        now = steady_time()
        check_deadline(request.header.deadline, now)
        added = self.rules.complete(request, prompt_token_ids, bad_words, max_model_len=self.max_model_len, now=now)
        if (begun := request.latency) is not None:
            tracker = LatencyTracker(Phase.TOKENISE, begun.stamp, begun)
            added = msgspec.structs.replace(added, latency=tracker.breakdown(time.time()))
        self.send(self.scheduler, msgspec.structs.replace(added, header=sent(added.header)))
        if time.monotonic() - started > LONG:
            self.outbox.flush()  # it does not wait for what came with it
        duration = round(time.monotonic() - started, 6)
        if self.settings.observation.tracing:
            self.afterwards(
                lambda: request_logger(log, request.header).info(
                    "request_tokenized", num_prompt_tokens=len(prompt_token_ids) // 4, duration=duration
                )
            )

    @contextlib.contextmanager
    def _contained(self, job: Preparation, trace_id: str = "") -> Iterator[None]:
        """Whatever goes wrong within ends this one request, and nothing else."""
        try:
            yield
        except RequestError as error:
            rejection = RequestRejected(
                job.request_id, error.code, str(error), error.field, error.retry_after_ms, error.reason
            )
            self.send(job.gateway, rejection)
        except Exception:
            log.exception("request_failed", request_id=job.request_id, trace_id=trace_id)
            text = "the request could not be tokenized"
            self.send(job.gateway, RequestRejected(job.request_id, RejectCode.INTERNAL, text))

    # -- life

    async def on_start(self) -> None:
        if self.renderers is not None:
            await self.renderers.start()
        await super().on_start()

    def on_drain(self, deadline: float) -> None:
        """Leave the roster first, so that no new requests are sent here, then finish those under way."""
        self.send(self.scheduler, Goodbye(self.service, self.instance, self.epoch))
        self.spawn(self._stop_when_done(deadline))

    async def _stop_when_done(self, deadline: float) -> None:
        # Requests sent before the others knew may still arrive for a while.
        await asyncio.sleep(min(self.settings.deployment.heartbeat_interval, max(0.0, deadline - steady_time())))
        if self.pending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - steady_time())):
                    await self._idle.wait()
        self.stop()
        self.post(Tick())  # wakes the run loop, which then sees that it is over

    async def on_stop(self) -> None:
        await super().on_stop()
        self.lane.close()
        self.decodings.close()
        if self.renderers is not None:
            await self.renderers.close()
        await self.compilers.close()
        await self.encoders.close()


def _is_long(request: TokenizeRequest) -> bool:
    """Whether it takes longer to prepare than others should wait for."""
    if request.chat is not None or num_word_chars(request.params) > LONG_TEXT:
        return True
    return request.text is not None and len(request.text) > LONG_TEXT


def _allowance(request: TokenizeRequest | EncodeRequest) -> float:
    """Times the usual that a request may wait for a child, and its work take."""
    return RESUMED_ALLOWANCE if isinstance(request, TokenizeRequest) and request.is_resumed else 1.0
