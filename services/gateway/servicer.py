"""The gRPC services, thin: read the call, ask the actor, write the answer or abort with a status."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc

from protos.pageant.v1 import control_pb2, inference_pb2
from services.gateway import convert, status
from services.gateway.header import CallMetadata, make_header, read_metadata, seeded
from services.gateway.report import StreamReport
from services.gateway.streams import Stream
from shared.errors import RejectCode, RequestError
from shared.messages import DecodeRequest, EncodeRequest, TokenizeRequest
from shared.messages.codec import MAX_MESSAGE_BYTES
from shared.packing import unpack_tokens

if TYPE_CHECKING:
    from services.gateway.actor import GatewayActor

QUESTION_TIMEOUT = 30.0  # seconds, for a client that set no deadline
LOAD_TIMEOUT = 1.0
MAX_TOKENS_PER_MESSAGE = MAX_MESSAGE_BYTES // 8
MAX_LABEL_CHARS = 256  # it is in every log line of its request
FOREVER = 1e8  # seconds; how gRPC spells "no deadline" on some paths

T = TypeVar("T")


class InferenceServicer:
    """`pageant.v1.Inference`."""

    def __init__(self, actor: GatewayActor) -> None:
        self._actor = actor

    async def Generate(self, proto: Any, context: Any) -> None:
        """Written with `context.write`, not as a generator: a cancelled call then always reaches the `finally`."""
        report = StreamReport()
        try:
            request = self._read(proto, context)
            await _within(request.header.deadline, self._serve(proto, request, context, report))
        except RequestError as error:
            report.failed(error)
            await abort(context, error)
        except asyncio.CancelledError:
            report.cancelled(expired=remaining(context) == 0)
            raise
        except grpc.aio.InternalError:  # a write to a client who is gone
            report.cancelled(expired=False)

    def _read(self, proto: Any, context: Any) -> TokenizeRequest:
        self._check_model(proto.model)
        if len(proto.label) > MAX_LABEL_CHARS:
            raise RequestError(f"label has {len(proto.label)} characters, more than {MAX_LABEL_CHARS}", field="label")
        params = seeded(convert.sampling_from_proto(proto.sampling))
        header = make_header(
            metadata(context),
            gateway=self._actor.inbox.address,
            label=proto.label,
            priority=proto.priority,
            now=time.time(),
            remaining=remaining(context),
        )
        limit = self._actor.roster.max_input_length or MAX_TOKENS_PER_MESSAGE
        return convert.tokenize_request(proto, header, params, limit)

    async def _serve(self, proto: Any, request: TokenizeRequest, context: Any, report: StreamReport) -> None:
        try:
            await self._actor.until_available()
            stream = self._actor.open(request)
        finally:
            report.received(request)
        try:
            await context.send_initial_metadata((("x-request-id", request.header.request_id),))
            await self._write(proto, stream, context, report)
        finally:
            self._actor.close(stream)
        if stream.error is not None:
            raise stream.error
        report.finished(stream)

    async def _write(self, proto: Any, stream: Stream, context: Any, report: StreamReport) -> None:
        """Send output as it comes.  While one write waits for a slow reader, what follows gathers in the stream."""
        with_token_ids = proto.stream.return_token_ids or not stream.request.params.detokenize
        while deltas := await stream.take():
            for delta in deltas:
                report.progressed()
                if with_token_ids or not delta.empty:
                    await context.write(
                        convert.generate_response(stream.header.request_id, delta, with_token_ids=with_token_ids)
                    )

    async def Tokenize(self, proto: Any, context: Any) -> Any:
        try:
            self._check_model(proto.model)
            kind = proto.WhichOneof("input")
            if kind is None:
                raise convert.no_input()
            question = EncodeRequest(
                uuid.uuid4().hex,
                self._actor.inbox.address,
                text=proto.text if kind == "text" else None,
                chat=convert.chat_messages(proto.chat) if kind == "chat" else None,
                add_special_tokens=proto.add_special_tokens if proto.HasField("add_special_tokens") else True,
            )
            answer: Any = await self._ask(question, context)
            return inference_pb2.TokenizeResponse(token_ids=unpack_tokens(answer.token_ids))
        except RequestError as error:
            await abort(context, error)

    async def Detokenize(self, proto: Any, context: Any) -> Any:
        try:
            self._check_model(proto.model)
            question = DecodeRequest(
                uuid.uuid4().hex,
                self._actor.inbox.address,
                token_ids=convert.packed_prompt(proto.token_ids, MAX_TOKENS_PER_MESSAGE),
                skip_special_tokens=proto.skip_special_tokens if proto.HasField("skip_special_tokens") else True,
            )
            answer: Any = await self._ask(question, context)
            return inference_pb2.DetokenizeResponse(text=answer.text)
        except RequestError as error:
            await abort(context, error)

    async def ListModels(self, _: Any, context: Any) -> Any:
        model = convert.model_proto(self._actor.settings.model_name, self._actor.roster)
        return inference_pb2.ListModelsResponse(models=[model])

    async def _ask(self, question: EncodeRequest | DecodeRequest, context: Any) -> Any:
        await self._actor.until_available()
        left = remaining(context)
        return await self._actor.ask_tokenizer(question, QUESTION_TIMEOUT if left is None else left)

    def _check_model(self, name: str) -> None:
        served = self._actor.settings.model_name
        if name and name != served:
            raise RequestError(
                f"model {name!r} is not served; served: {served}", field="model", code=RejectCode.NOT_FOUND
            )


class ControlServicer:
    """`pageant.v1.Control`."""

    def __init__(self, actor: GatewayActor) -> None:
        self._actor = actor

    async def GetLoad(self, _: Any, context: Any) -> Any:
        try:
            load: Any = await self._actor.ask_load(LOAD_TIMEOUT)
            return convert.load_response(load, len(self._actor.journal))
        except RequestError as error:
            await abort(context, error)

    async def Abort(self, proto: Any, context: Any) -> Any:
        if not (proto.request_id or proto.label):
            await abort(context, RequestError("request_id or label must be given", field="target"))
        num_aborted = self._actor.abort(request_id=proto.request_id, label=proto.label, tenant=metadata(context).tenant)
        return control_pb2.AbortResponse(num_aborted=num_aborted)

    async def Drain(self, proto: Any, context: Any) -> Any:
        self._actor.request_drain(time.time() + proto.timeout if proto.HasField("timeout") else None)
        return control_pb2.DrainResponse(num_open_streams=len(self._actor.journal))


async def _within(deadline: float | None, work: Awaitable[T]) -> T:
    """Await `work` until `deadline` (Unix seconds); raises RequestError past it."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(deadline - time.time()):
            return await work
    except TimeoutError:
        raise RequestError("the call's deadline passed", code=RejectCode.DEADLINE_EXCEEDED) from None


async def abort(context: Any, error: RequestError) -> NoReturn:
    """End the call with the error's status."""
    await context.abort(status.STATUS[error.code], status.details(error), status.trailing_metadata(error))
    raise AssertionError("context.abort returned")


def remaining(context: Any) -> float | None:
    """Seconds that the caller still waits, or None where it set no deadline."""
    left: float | None = context.time_remaining()
    return None if left is None or left > FOREVER else max(0.0, left)


def metadata(context: Any) -> CallMetadata:
    return read_metadata((key, value) for key, value in context.invocation_metadata() or ())
