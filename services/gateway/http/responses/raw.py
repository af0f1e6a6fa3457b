"""What the model was given for a response and what it wrote, token by token: vLLM's `enable_response_messages`."""

from __future__ import annotations

from starlette.requests import Request

from services.gateway.http.requests.gate import Gate
from services.gateway.http.responses.objects import RawMessage, ResponseObject
from services.gateway.streams.stream import StreamDelta


class RawMessages:
    """Of one response."""

    def __init__(self, gate: Gate, request: Request, prompt: list[int]) -> None:
        self._gate = gate
        self._request = request
        self._prompt = prompt
        self._output: list[int] = []

    def take(self, delta: StreamDelta) -> None:
        self._output += delta.token_ids

    async def tell(self, response: ResponseObject) -> None:
        """Put them into the response, which is over."""
        response.input_messages = [await self._message(self._prompt)]
        response.output_messages = [await self._message(self._output)]

    async def _message(self, token_ids: list[int]) -> RawMessage:
        text = await self._gate.decode(self._request, token_ids, skip_special_tokens=False)
        return RawMessage(message=text, tokens=token_ids)
