"""Short questions that the gateway asks other services, on behalf of its clients and for itself."""

from __future__ import annotations

import asyncio
import uuid

from services.gateway.access.limits import Admission, prompt_tokens
from services.gateway.bus.bus import Bus
from services.gateway.bus.calls import Calls, Question
from services.gateway.bus.deployment import RosterView
from services.gateway.bus.refusals import unavailable
from shared.errors import RejectCode, RequestError
from shared.messages import (
    AbortRequest,
    DecodeRequest,
    DescribeRequest,
    EncodeRequest,
    GetLoad,
    LoadAdapter,
    Message,
    PiecesRequest,
    UnloadAdapter,
)

MAX_CALLS = 1024  # questions without an answer, each of which may hold a prompt
QUESTION_TIMEOUT = 30.0  # seconds, for a client that set no deadline


class Questions:
    """Each raises RequestError where there is no answer in time, or the answer is a refusal."""

    def __init__(self, bus: Bus, deployment: RosterView, calls: Calls, admission: Admission) -> None:
        self._bus = bus
        self._deployment = deployment
        self._calls = calls
        self._admission = admission

    async def ask_tokenizer(self, question: EncodeRequest | DecodeRequest, seconds: float) -> Message:
        """Ask on a client's behalf: it counts as a request of its tenant while there is no answer."""
        name = question.request_id
        self._admission.enter(name, question.tenant, prompt_tokens(question))
        try:
            return await self._ask(question, self._deployment.tokenizer(name), seconds)
        except (RequestError, asyncio.CancelledError):  # what is in a queue there need not be begun with
            if address := self._deployment.tokenizer(name):
                self._bus.send_soon(address, AbortRequest(name, gateway=self._bus.address))
            raise
        finally:
            self._admission.leave(name, question.tenant)

    async def ask_pieces(self, question: PiecesRequest | DescribeRequest, seconds: float) -> Message:
        """Ask for ourselves, on behalf of requests that are let in."""
        return await self._ask(question, self._deployment.tokenizer(question.request_id), seconds)

    async def ask_load(self, seconds: float) -> Message:
        """How loaded the deployment is, as the scheduler knows it."""
        return await self.ask_scheduler(GetLoad(uuid.uuid4().hex, self._bus.address), seconds)

    async def ask_scheduler(self, question: GetLoad | LoadAdapter | UnloadAdapter, seconds: float) -> Message:
        if not self._bus.scheduler_is_live:
            raise unavailable("no scheduler is live")
        return await self._ask(question, self._bus.scheduler, seconds)

    async def _ask(self, question: Question, address: str, seconds: float) -> Message:
        if len(self._calls) >= MAX_CALLS:
            raise RequestError(
                f"{len(self._calls)} questions are open at this gateway, the limit is {MAX_CALLS}",
                code=RejectCode.RESOURCE_EXHAUSTED,
                retry_after_ms=100,
            )
        call = self._calls.add(question, address)
        if address:
            self._bus.send_soon(address, question)
        return await self._calls.wait(call, seconds)
