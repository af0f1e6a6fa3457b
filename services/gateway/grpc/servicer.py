"""The gRPC services, thin: read the call, ask the service, write the answer or abort with a status."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import Any

import grpc
import msgspec

from protos.pageant.v1 import control_pb2, inference_pb2
from services.gateway.access.auth import Access
from services.gateway.access.header import check_key, make_header, seeded, traceparent
from services.gateway.generation.checks import MAX_TOKENS_PER_MESSAGE, check_label
from services.gateway.generation.embedding import check_inputs, embed, embedding_params
from services.gateway.generation.models import ServedModels
from services.gateway.generation.service import GenerationService
from services.gateway.grpc import convert
from services.gateway.grpc.status import abort
from services.gateway.health.load_report import BINARY, is_asked
from services.gateway.streams.report import StreamReport
from services.gateway.streams.stream import Stream, StreamDelta
from shared.clocks.clock import steady_time
from shared.errors import RejectCode, RequestError
from shared.messages import TokenizeRequest
from shared.requests.reasoning import ThinkingBudget

LOAD_TIMEOUT = 1.0
FOREVER = 1e8  # seconds; how gRPC spells "no deadline" on some paths
MAX_DRAIN_TIMEOUT = 1e7  # seconds

Method = Callable[[Any, Any, Any], Awaitable[Any]]
# The budget of a model's answer, from what the client gave; the last: the prompt is a chat.
BudgetReader = Callable[[str, int, bool], Awaitable[ThinkingBudget | None]]


def answering(method: Method) -> Method:
    """A servicer's method that ends the call with the status of the RequestError that `method` raises."""

    @wraps(method)
    async def call(servicer: Any, proto: Any, context: Any) -> Any:
        try:
            return await method(servicer, proto, context)
        except RequestError as error:
            await abort(context, error)

    return call


class InferenceServicer:
    """`pageant.v1.Inference`."""

    def __init__(self, models: ServedModels, access: Access, thinking_budget: BudgetReader) -> None:
        self._models = models
        self._access = access
        self._thinking_budget = thinking_budget

    @answering
    async def Generate(self, proto: Any, context: Any) -> None:
        """Written with `context.write`, not as a generator: a cancelled call then always reaches the `finally`."""
        service = self._models.first
        try:
            service = self._models.of(proto.model)
            request, has = self._read(service, proto, context), convert.positions(proto)
            if proto.sampling.HasField("thinking_token_budget"):
                request = await self._with_thinking(request, proto)
        except RequestError as error:
            StreamReport(service.meter).failed(error)
            raise
        await service.generate(request, lambda stream: self._write(service, proto, stream, context), has=has)

    def _read(self, service: GenerationService, proto: Any, context: Any) -> TokenizeRequest:
        check_label(proto.label)
        check_key(proto.idempotency_key)
        caller = self._access.caller(metadata(context))
        params = seeded(convert.sampling_from_proto(proto.sampling), caller.tenant, proto.idempotency_key)
        header = make_header(
            caller,
            gateway=service.address,
            label=proto.label,
            priority=proto.priority,
            now=time.time(),
            remaining=remaining(context),
            key=proto.idempotency_key,
            is_gathered=proto.stream.gather,
            adapter=service.adapters.of(proto.model),
        )
        limit = service.deployment.roster.max_input_length or MAX_TOKENS_PER_MESSAGE
        return convert.tokenize_request(proto, header, params, limit)

    async def _with_thinking(self, request: TokenizeRequest, proto: Any) -> TokenizeRequest:
        given = proto.sampling.thinking_token_budget
        budget = await self._thinking_budget(proto.model, given, request.chat is not None)
        return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, thinking=budget))

    async def _write(self, service: GenerationService, proto: Any, stream: Stream, context: Any) -> None:
        """Send output as it comes.  While one write waits for a slow reader, what follows gathers in the stream."""
        header = stream.header
        with_token_ids = proto.stream.return_token_ids or not stream.request.params.detokenize
        await context.send_initial_metadata((("x-request-id", header.request_id), ("traceparent", traceparent(header))))
        try:
            while deltas := await stream.take():
                for response in responses(stream, deltas, with_token_ids=with_token_ids, explained=proto.explain):
                    await context.write(response)
        except grpc.aio.InternalError:
            raise RequestError("the client went away", code=RejectCode.CANCELLED) from None
        if is_asked(metadata(context)):
            await service.load_reports.refresh()
            context.set_trailing_metadata(((BINARY, service.load_reports.binary()),))

    @answering
    async def Embed(self, proto: Any, context: Any) -> Any:
        service = self._models.of(proto.model)
        check_inputs(len(proto.inputs))
        params = embedding_params(convert.pooling_from_proto(proto))
        caller, limit = self._access.caller(metadata(context)), service.deployment.roster.max_input_length

        def make_request(place: int) -> TokenizeRequest:
            header = make_header(
                caller,
                gateway=service.address,
                label="",
                priority=proto.priority,
                now=time.time(),
                remaining=remaining(context),
                adapter=service.adapters.of(proto.model),
            )
            return convert.tokenize_request(proto.inputs[place], header, params, limit or MAX_TOKENS_PER_MESSAGE)

        return convert.embed_response(await embed(service, len(proto.inputs), make_request))

    @answering
    async def Tokenize(self, proto: Any, context: Any) -> Any:
        service = self._models.of(proto.model)
        kind = proto.WhichOneof("input")
        if kind is None:
            raise convert.no_input(proto)
        ids = await service.questions.encode(
            self._access.caller(metadata(context)).tenant,
            remaining(context),
            text=proto.text if kind == "text" else None,
            chat=convert.chat_messages(proto.chat) if kind == "chat" else None,
            add_special_tokens=proto.add_special_tokens if proto.HasField("add_special_tokens") else True,
        )
        return inference_pb2.TokenizeResponse(token_ids=ids)

    @answering
    async def Detokenize(self, proto: Any, context: Any) -> Any:
        service = self._models.of(proto.model)
        tenant = self._access.caller(metadata(context)).tenant
        skips = proto.skip_special_tokens if proto.HasField("skip_special_tokens") else True
        text = await service.questions.decode(tenant, proto.token_ids, remaining(context), skip_special_tokens=skips)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(self, _: Any, context: Any) -> Any:
        models = []
        for service in self._models:
            roster, base = service.deployment.roster, service.names[0]
            models.append(convert.model_proto(base, roster))
            models += [convert.model_proto(name, roster, parent=base) for name in service.adapters.listed()]
        return inference_pb2.ListModelsResponse(models=models)


class ControlServicer:
    """`pageant.v1.Control`.  `drain` asks the process to end, by a time of the steady clock where there is one."""

    def __init__(self, models: ServedModels, access: Access, drain: Callable[[float | None], None]) -> None:
        self._models = models
        self._access = access
        self._drain = drain

    @property
    def _num_open(self) -> int:
        return sum(len(service.journal) for service in self._models)

    @answering
    async def GetLoad(self, proto: Any, context: Any) -> Any:
        """Of the scheduler of the model that is named."""
        load = await self._models.of(proto.model).questions.load(LOAD_TIMEOUT)
        return convert.load_response(load, self._num_open)

    @answering
    async def Abort(self, proto: Any, context: Any) -> Any:
        if not (proto.request_id or proto.label):
            raise RequestError("request_id or label must be given", field="target")
        tenant, own_only = self._access.caller(metadata(context)).tenant, not self._access.is_open
        num_aborted = sum(
            service.abort(request_id=proto.request_id, label=proto.label, tenant=tenant, own_only=own_only)
            for service in self._models
        )
        return control_pb2.AbortResponse(num_aborted=num_aborted)

    @answering
    async def LoadAdapter(self, proto: Any, context: Any) -> Any:
        self._access.check_operator(self._access.caller(metadata(context)))
        adapter = await self._models.of(proto.model).adapters.load(proto.lora_name, proto.lora_path)
        return control_pb2.LoadAdapterResponse(digest=adapter.digest)

    @answering
    async def UnloadAdapter(self, proto: Any, context: Any) -> Any:
        self._access.check_operator(self._access.caller(metadata(context)))
        await self._models.of(proto.model).adapters.unload(proto.lora_name)
        return control_pb2.UnloadAdapterResponse()

    @answering
    async def Drain(self, proto: Any, context: Any) -> Any:
        self._access.check_operator(self._access.caller(metadata(context)))
        if not 0 <= proto.timeout <= MAX_DRAIN_TIMEOUT:  # nor NaN
            limit = f"must be in [0, {MAX_DRAIN_TIMEOUT:g}] seconds, got {proto.timeout}"
            raise RequestError(f"timeout {limit}", field="timeout")
        self._drain(steady_time() + proto.timeout if proto.HasField("timeout") else None)
        return control_pb2.DrainResponse(num_open_streams=self._num_open)


def responses(
    stream: Stream, deltas: list[StreamDelta], *, with_token_ids: bool, explained: bool
) -> Iterator[Any]:  # pageant.v1.GenerateResponse
    """What is written of output that was taken together; the last response of an explained stream explains it."""
    last = deltas[-1] if explained and stream.finished else None
    for delta in deltas:
        if with_token_ids or not delta.empty:
            response = convert.generate_response(
                stream.header.request_id, delta, with_token_ids=with_token_ids, fingerprint=stream.fingerprint
            )
            if delta is last and stream.latency is not None:
                response.explanation.CopyFrom(convert.explanation_to_proto(stream.latency.explanation()))
            yield response


def remaining(context: Any) -> float | None:
    """Seconds that the caller still waits, or None where it set no deadline."""
    left: float | None = context.time_remaining()
    return None if left is None or left > FOREVER else max(0.0, left)


def metadata(context: Any) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key, value in context.invocation_metadata() or ()]
