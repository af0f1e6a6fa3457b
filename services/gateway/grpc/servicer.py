"""The gRPC services, thin: read the call, ask the service, write the answer or abort with a status."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import grpc

from protos.pageant.v1 import control_pb2, inference_pb2
from services.gateway.access.auth import Access
from services.gateway.access.header import check_key, make_header, seeded, traceparent
from services.gateway.generation.checks import MAX_TOKENS_PER_MESSAGE, check_label, check_model, packed_prompt
from services.gateway.generation.embedding import check_inputs, embed, embedding_params
from services.gateway.generation.questions import QUESTION_TIMEOUT
from services.gateway.generation.service import GenerationService
from services.gateway.grpc import convert
from services.gateway.grpc.status import abort
from services.gateway.health.load_report import BINARY, LoadReports, is_asked
from services.gateway.streams.report import StreamReport
from services.gateway.streams.stream import Stream, StreamDelta
from shared.clock import steady_time
from shared.errors import RejectCode, RequestError
from shared.messages import DecodeRequest, EncodeRequest, TokenizeRequest
from shared.packing import unpack_tokens

LOAD_TIMEOUT = 1.0
FOREVER = 1e8  # seconds; how gRPC spells "no deadline" on some paths
MAX_DRAIN_TIMEOUT = 1e7  # seconds

Method = Callable[[Any, Any, Any], Awaitable[Any]]


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

    def __init__(self, service: GenerationService, access: Access, load_reports: LoadReports, model_name: str) -> None:
        self._service = service
        self._access = access
        self._load_reports = load_reports
        self._model_name = model_name

    @answering
    async def Generate(self, proto: Any, context: Any) -> None:
        """Written with `context.write`, not as a generator: a cancelled call then always reaches the `finally`."""
        try:
            request, has = self._read(proto, context), convert.positions(proto)
        except RequestError as error:
            StreamReport(self._service.meter).failed(error)
            raise
        await self._service.generate(request, lambda stream: self._write(proto, stream, context), has=has)

    def _read(self, proto: Any, context: Any) -> TokenizeRequest:
        self._check_model(proto.model)
        check_label(proto.label)
        check_key(proto.idempotency_key)
        caller = self._access.caller(metadata(context))
        params = seeded(convert.sampling_from_proto(proto.sampling), caller.tenant, proto.idempotency_key)
        header = make_header(
            caller,
            gateway=self._service.address,
            label=proto.label,
            priority=proto.priority,
            now=time.time(),
            remaining=remaining(context),
            key=proto.idempotency_key,
        )
        limit = self._service.deployment.roster.max_input_length or MAX_TOKENS_PER_MESSAGE
        return convert.tokenize_request(proto, header, params, limit)

    async def _write(self, proto: Any, stream: Stream, context: Any) -> None:
        """Send output as it comes.  While one write waits for a slow reader, what follows gathers in the stream."""
        header = stream.header
        await context.send_initial_metadata((("x-request-id", header.request_id), ("traceparent", traceparent(header))))
        try:
            while deltas := await stream.take():
                await self._write_all(proto, stream, deltas, context)
        except grpc.aio.InternalError:
            raise RequestError("the client went away", code=RejectCode.CANCELLED) from None
        if is_asked(metadata(context)):
            reports = self._load_reports
            await reports.refresh()
            context.set_trailing_metadata(((BINARY, reports.binary()),))

    async def _write_all(self, proto: Any, stream: Stream, deltas: list[StreamDelta], context: Any) -> None:
        with_token_ids = proto.stream.return_token_ids or not stream.request.params.detokenize
        last = deltas[-1] if stream.finished else None
        for delta in deltas:
            if with_token_ids or not delta.empty:
                response = convert.generate_response(
                    stream.header.request_id, delta, with_token_ids=with_token_ids, fingerprint=stream.fingerprint
                )
                if proto.explain and delta is last and stream.latency is not None:
                    response.explanation.CopyFrom(convert.explanation_to_proto(stream.latency.explanation()))
                await context.write(response)

    @answering
    async def Embed(self, proto: Any, context: Any) -> Any:
        self._check_model(proto.model)
        check_inputs(len(proto.inputs))
        params = embedding_params(convert.pooling_from_proto(proto))
        caller, limit = self._access.caller(metadata(context)), self._service.deployment.roster.max_input_length

        def make_request(place: int) -> TokenizeRequest:
            header = make_header(
                caller,
                gateway=self._service.address,
                label="",
                priority=proto.priority,
                now=time.time(),
                remaining=remaining(context),
            )
            return convert.tokenize_request(proto.inputs[place], header, params, limit or MAX_TOKENS_PER_MESSAGE)

        return convert.embed_response(await embed(self._service, len(proto.inputs), make_request))

    @answering
    async def Tokenize(self, proto: Any, context: Any) -> Any:
        self._check_model(proto.model)
        kind = proto.WhichOneof("input")
        if kind is None:
            raise convert.no_input(proto)
        question = EncodeRequest(
            uuid.uuid4().hex,
            self._service.address,
            text=proto.text if kind == "text" else None,
            chat=convert.chat_messages(proto.chat) if kind == "chat" else None,
            add_special_tokens=proto.add_special_tokens if proto.HasField("add_special_tokens") else True,
            tenant=self._access.caller(metadata(context)).tenant,
        )
        answer: Any = await self._ask(question, context)
        return inference_pb2.TokenizeResponse(token_ids=unpack_tokens(answer.token_ids))

    @answering
    async def Detokenize(self, proto: Any, context: Any) -> Any:
        self._check_model(proto.model)
        question = DecodeRequest(
            uuid.uuid4().hex,
            self._service.address,
            token_ids=packed_prompt(proto.token_ids, MAX_TOKENS_PER_MESSAGE),
            skip_special_tokens=proto.skip_special_tokens if proto.HasField("skip_special_tokens") else True,
            tenant=self._access.caller(metadata(context)).tenant,
        )
        answer: Any = await self._ask(question, context)
        return inference_pb2.DetokenizeResponse(text=answer.text)

    async def ListModels(self, _: Any, context: Any) -> Any:
        model = convert.model_proto(self._model_name, self._service.deployment.roster)
        return inference_pb2.ListModelsResponse(models=[model])

    async def _ask(self, question: EncodeRequest | DecodeRequest, context: Any) -> Any:
        await self._service.readiness.until_available()
        left = remaining(context)
        return await self._service.questions.ask_tokenizer(question, QUESTION_TIMEOUT if left is None else left)

    def _check_model(self, name: str) -> None:
        check_model(name, self._model_name)


class ControlServicer:
    """`pageant.v1.Control`.  `drain` asks the process to end, by a time of the steady clock where there is one."""

    def __init__(self, service: GenerationService, access: Access, drain: Callable[[float | None], None]) -> None:
        self._service = service
        self._access = access
        self._drain = drain

    @answering
    async def GetLoad(self, _: Any, context: Any) -> Any:
        load: Any = await self._service.questions.ask_load(LOAD_TIMEOUT)
        return convert.load_response(load, len(self._service.journal))

    @answering
    async def Abort(self, proto: Any, context: Any) -> Any:
        if not (proto.request_id or proto.label):
            raise RequestError("request_id or label must be given", field="target")
        tenant = self._access.caller(metadata(context)).tenant
        num_aborted = self._service.abort(
            request_id=proto.request_id, label=proto.label, tenant=tenant, own_only=not self._access.is_open
        )
        return control_pb2.AbortResponse(num_aborted=num_aborted)

    @answering
    async def Drain(self, proto: Any, context: Any) -> Any:
        self._access.check_operator(self._access.caller(metadata(context)))
        if not 0 <= proto.timeout <= MAX_DRAIN_TIMEOUT:  # nor NaN
            limit = f"must be in [0, {MAX_DRAIN_TIMEOUT:g}] seconds, got {proto.timeout}"
            raise RequestError(f"timeout {limit}", field="timeout")
        self._drain(steady_time() + proto.timeout if proto.HasField("timeout") else None)
        return control_pb2.DrainResponse(num_open_streams=len(self._service.journal))


def remaining(context: Any) -> float | None:
    """Seconds that the caller still waits, or None where it set no deadline."""
    left: float | None = context.time_remaining()
    return None if left is None or left > FOREVER else max(0.0, left)


def metadata(context: Any) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key, value in context.invocation_metadata() or ()]
