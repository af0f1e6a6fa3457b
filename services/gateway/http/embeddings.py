"""/v1/embeddings: texts, token ids or a chat in, one vector for each."""

from __future__ import annotations

import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation.embedding import Embedded, check_inputs, total
from services.gateway.http.answers.events import WholeResponse
from services.gateway.http.answers.objects import encode
from services.gateway.http.answers.vectors import check_packing, packed, shortened
from services.gateway.http.pooling.inputs import InputFields, check_fields, pooled, read_inputs
from services.gateway.http.requests.fields import Int
from services.gateway.http.requests.gate import Gate
from shared.errors import RequestError
from shared.pooling import Pooling, PoolingKind


class EmbeddingBody(InputFields, kw_only=True):
    """OpenAI's fields, vLLM's `normalize` and `add_special_tokens`, and our `pooling`."""

    encoding_format: str | None = None  # float or base64
    dimensions: Int | None = None  # so many first components, and again of length 1 where vectors are
    embed_dtype: str | None = None  # with base64: float32, float16 or bfloat16
    endianness: str | None = None  # with base64: native, little or big
    pooling: str | None = None  # last or mean: which hidden states make the vector
    normalize: bool | None = None  # as use_activation


class EmbeddingObject(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    id: str
    created: int
    object: str = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class Embeddings:
    """The endpoint."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def post(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, EmbeddingBody)
        gate = self._gate.choose(body.model)
        _check(body)
        pooling = _pooling(body)
        prompts = await read_inputs(gate, request, body)
        check_inputs(len(prompts))

        async def answer() -> bytes:
            return _encode(gate, body, await pooled(gate, request, body, prompts, pooling))

        return WholeResponse(answer, {})


def _encode(gate: Gate, body: EmbeddingBody, embedded: list[Embedded]) -> bytes:
    vectors = [shortened(one.values(), body.dimensions, normalize=_normalizes(body)) for one in embedded]
    as_text = body.encoding_format == "base64"
    data = [
        EmbeddingObject(
            index=index,
            embedding=packed(vector, body.embed_dtype, body.endianness) if as_text else vector.tolist(),
        )
        for index, vector in enumerate(vectors)
    ]
    num_tokens = total(embedded)
    usage = EmbeddingUsage(num_tokens, num_tokens)
    return encode(
        EmbeddingList(
            id=f"embd-{uuid.uuid4().hex}",
            created=int(time.time()),
            data=data,
            model=gate.model_name(body.model),
            usage=usage,
        )
    )


def _check(body: EmbeddingBody) -> None:
    if body.encoding_format not in (None, "float", "base64"):
        raise RequestError("encoding_format must be float or base64", field="encoding_format")
    check_fields(body)
    if None not in (body.normalize, body.use_activation) and body.normalize != body.use_activation:
        raise RequestError("use_activation contradicts normalize", field="use_activation")
    check_packing(body.encoding_format, body.embed_dtype, body.endianness)


def _normalizes(body: EmbeddingBody) -> bool:
    return body.normalize is not False and body.use_activation is not False


def _pooling(body: EmbeddingBody) -> Pooling:
    kinds = [PoolingKind.LAST.value, PoolingKind.MEAN.value]
    if body.pooling is not None and body.pooling not in kinds:
        raise RequestError(f"pooling must be one of {', '.join(kinds)}", field="pooling")
    return Pooling(PoolingKind(body.pooling or PoolingKind.LAST), _normalizes(body))
