"""Short questions that the gateway asks other services, on behalf of its clients and for itself."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from services.gateway.access.limits import Admission, prompt_tokens
from services.gateway.bus.bus import Bus
from services.gateway.bus.calls import Calls, Question
from services.gateway.bus.deployment import RosterView
from services.gateway.bus.refusals import UNSENDABLE, unavailable, unsendable
from services.gateway.generation.checks import MAX_TOKENS_PER_MESSAGE, packed_prompt
from services.gateway.health.readiness import Readiness
from shared.errors import RejectCode, RequestError
from shared.messages import (
    AbortRequest,
    ChatMessage,
    ChatOptions,
    DecodeRequest,
    DecodeResult,
    DescribeRequest,
    DescribeResult,
    EncodeRequest,
    EncodeResult,
    GetLoad,
    Load,
    LoadAdapter,
    PiecesRequest,
    PiecesResult,
    UnloadAdapter,
)
from shared.packing import pack_tokens, unpack_tokens

MAX_CALLS = 1024  # questions without an answer, each of which may hold a prompt
QUESTION_TIMEOUT = 30.0  # seconds, for a client that set no deadline


class Questions:
    """Each raises RequestError where there is no answer in time, or the answer is a refusal."""

    def __init__(
        self, bus: Bus, deployment: RosterView, readiness: Readiness, calls: Calls, admission: Admission
    ) -> None:
        self._bus = bus
        self._deployment = deployment
        self._readiness = readiness
        self._calls = calls
        self._admission = admission

    # -- for clients

    async def encode(
        self,
        tenant: str,
        seconds: float | None = None,
        *,
        text: str | None = None,
        chat: list[ChatMessage] | None = None,
        options: ChatOptions | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a text or a chat.  `seconds`: that the client waits, None where it does not say."""
        question = EncodeRequest(
            *self._name(),
            text=text,
            chat=chat,
            add_special_tokens=add_special_tokens,
            chat_options=options,
            tenant=tenant,
        )
        answer: EncodeResult = await self.ask_tokenizer(question, seconds)
        return unpack_tokens(answer.token_ids)

    async def decode(
        self, tenant: str, token_ids: Sequence[int], seconds: float | None = None, *, skip_special_tokens: bool
    ) -> str:
        packed = packed_prompt(token_ids, MAX_TOKENS_PER_MESSAGE)
        question = DecodeRequest(*self._name(), packed, skip_special_tokens=skip_special_tokens, tenant=tenant)
        answer: DecodeResult = await self.ask_tokenizer(question, seconds)
        return answer.text

    async def ask_tokenizer(self, question: EncodeRequest | DecodeRequest, seconds: float | None) -> Any:
        """It counts as a request of its tenant while there is no answer."""
        await self._readiness.until_available()
        name, seconds = question.request_id, QUESTION_TIMEOUT if seconds is None else seconds
        self._admission.enter(name, question.tenant, prompt_tokens(question))
        try:
            return await self._ask(question, self._deployment.tokenizer(name), seconds)
        except (RequestError, asyncio.CancelledError):  # what is in a queue there need not be begun with
            if address := self._deployment.tokenizer(name):
                self._bus.send_soon(address, AbortRequest(name, gateway=self._bus.address))
            raise
        finally:
            self._admission.leave(name, question.tenant)

    # -- for ourselves, on behalf of requests that are let in

    async def pieces(self, token_ids: list[int], *, as_written: bool = False) -> list[bytes]:
        """The bytes of each token; `as_written`: as the vocabulary writes it."""
        answer: PiecesResult = await self._ask_any(PiecesRequest(*self._name(), pack_tokens(token_ids), as_written))
        return answer.pieces

    async def describe(self, texts: Sequence[str] = ()) -> DescribeResult:
        """The tokenizer's configuration, with the chat template; and the token ids of texts of the server's own, in
        which special tokens are written by their names."""
        answer: DescribeResult = await self._ask_any(DescribeRequest(*self._name(), list(texts)))
        return answer

    async def _ask_any(self, question: PiecesRequest | DescribeRequest) -> Any:
        await self._readiness.until_available()
        return await self._ask(question, self._deployment.tokenizer(question.request_id), QUESTION_TIMEOUT)

    async def load(self, seconds: float) -> Load:
        """How loaded the deployment is, as the scheduler knows it."""
        answer: Load = await self.ask_scheduler(GetLoad(*self._name()), seconds)
        return answer

    async def ask_scheduler(self, question: GetLoad | LoadAdapter | UnloadAdapter, seconds: float) -> Any:
        if not self._bus.scheduler_is_live:
            raise unavailable("no scheduler is live")
        return await self._ask(question, self._bus.scheduler, seconds)

    def _name(self) -> tuple[str, str]:
        """A question's id, and where its answer goes."""
        return uuid.uuid4().hex, self._bus.address

    async def _ask(self, question: Question, address: str, seconds: float) -> Any:
        if len(self._calls) >= MAX_CALLS:
            raise RequestError(
                f"{len(self._calls)} questions are open at this gateway, the limit is {MAX_CALLS}",
                code=RejectCode.RESOURCE_EXHAUSTED,
                retry_after_ms=100,
            )
        call = self._calls.add(question, address)
        try:
            if address:
                self._bus.send_soon(address, question)
        except UNSENDABLE as error:
            self._calls.fail(question.request_id, unsendable(error))
        return await self._calls.wait(call, seconds)
