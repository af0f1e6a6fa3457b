"""/v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's fields: for the operators' keys."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from services.gateway.http.requests.gate import Gate
from shared.errors import RequestError


class LoadBody(msgspec.Struct, kw_only=True):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False  # a name that is loaded gets what is there now; else it is refused
    model: str | None = None  # that it changes; the first one where it is not said


class UnloadBody(msgspec.Struct, kw_only=True):
    lora_name: str = ""
    lora_int_id: int | None = None  # vLLM's; nothing is known by it here
    model: str | None = None


class AdapterEndpoints:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def load(self, request: Request) -> Response:
        self._gate.check_operator(request)
        body = await self._gate.bodies.read(request, LoadBody)
        adapters = self._gate.choose(body.model).service.adapters
        if not body.load_inplace and body.lora_name in adapters.known:
            text = f"lora_name {body.lora_name!r} has already been loaded; load_inplace: true replaces it"
            raise RequestError(text, field="lora_name")
        await adapters.load(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        self._gate.check_operator(request)
        body = await self._gate.bodies.read(request, UnloadBody)
        await self._gate.choose(body.model).service.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
