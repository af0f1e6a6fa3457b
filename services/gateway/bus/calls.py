"""Short questions to other services, each answered by one message: tokenize, detokenize, load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from services.gateway.bus.refusals import unavailable
from shared.errors import RequestError
from shared.messages import (
    DecodeRequest,
    DescribeRequest,
    EncodeRequest,
    GetLoad,
    LoadAdapter,
    Message,
    PiecesRequest,
    UnloadAdapter,
)

Question = EncodeRequest | DecodeRequest | PiecesRequest | DescribeRequest | GetLoad | LoadAdapter | UnloadAdapter


class PendingCall:
    """A question on its way; asking it again is harmless."""

    def __init__(self, question: Question, address: str) -> None:
        self.question = question
        self.address = address
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()


class Calls:
    """The questions of one gateway that have no answer yet, by request id."""

    def __init__(self) -> None:
        self._open: dict[str, PendingCall] = {}

    def __iter__(self) -> Iterator[PendingCall]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def add(self, question: Question, address: str) -> PendingCall:
        call = self._open[question.request_id] = PendingCall(question, address)
        return call

    def resolve(self, request_id: str, answer: Message) -> None:
        """An answer that no call waits for any more is dropped."""
        if (call := self._open.get(request_id)) and not call.answer.done():
            call.answer.set_result(answer)

    def fail(self, request_id: str, error: RequestError) -> None:
        if (call := self._open.get(request_id)) and not call.answer.done():
            call.answer.set_exception(error)

    async def wait(self, call: PendingCall, seconds: float) -> Message:
        """The answer, within `seconds`; raises RequestError."""
        try:
            async with asyncio.timeout(seconds):
                return await call.answer
        except TimeoutError:
            raise unavailable(f"no service answered within {seconds:g} s") from None
        finally:
            self._open.pop(call.question.request_id, None)
            call.answer.cancel()
