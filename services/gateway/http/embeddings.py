"""/v1/embeddings: texts, token ids or a chat in, one vector for each."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation.embedding import Embedded, check_inputs, total
from services.gateway.http.answers.answer import identity
from services.gateway.http.answers.events import WholeResponse
from services.gateway.http.answers.objects import encode
from services.gateway.http.answers.vectors import PACKED, check_packing, packed, packed_text, shortened
from services.gateway.http.pooling.inputs import InputFields, check_fields, pooled, read_inputs
from services.gateway.http.requests.fields import Int
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.reading import field_error
from shared.requests.pooling import Pooling, PoolingKind

MAX_DESCRIBED = 256  # a hundred bytes each, where clients read headers of some ten thousand


class EmbeddingBody(InputFields, kw_only=True):
    """OpenAI's fields, vLLM's `normalize` and `add_special_tokens`, and our `pooling`."""

    encoding_format: str | None = None  # float, base64, or of the body: bytes (a header describes them), bytes_only
    dimensions: Int | None = None  # so many first components, and again of length 1 where vectors are
    embed_dtype: str | None = None  # packed: float32, float16, bfloat16, fp8_e4m3 or fp8_e5m2
    endianness: str | None = None  # packed: native, little or big
    pooling: str | None = None  # last or mean: which hidden states make the vector
    normalize: bool | None = None  # as use_activation


class EmbeddingObject(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class PackedVector(msgspec.Struct, kw_only=True):
    """Where a body of bytes has a vector."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: list[int]


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

        if body.encoding_format == "bytes" and len(prompts) > MAX_DESCRIBED:
            raise field_error(
                "encoding_format",
                f"bytes describes at most {MAX_DESCRIBED} vectors in a header; bytes_only has no limit",
            )

        async def answer() -> bytes | Response:
            return _encode(gate, body, await pooled(gate, request, body, prompts, pooling))

        return WholeResponse(answer, {})


def _encode(gate: Gate, body: EmbeddingBody, embedded: list[Embedded]) -> bytes | Response:
    vectors = [shortened(one.values(), body.dimensions, normalize=_normalizes(body)) for one in embedded]
    num_tokens = total(embedded)
    known: dict[str, Any] = {
        **identity("embd", gate.model_name(body.model)),
        "usage": EmbeddingUsage(num_tokens, num_tokens),
    }
    if body.encoding_format in ("bytes", "bytes_only"):
        return _as_bytes(body, vectors, known)
    as_text = body.encoding_format == "base64"
    data = [
        EmbeddingObject(
            index=index,
            embedding=packed_text(vector, body.embed_dtype, body.endianness) if as_text else vector.tolist(),
        )
        for index, vector in enumerate(vectors)
    ]
    return encode(EmbeddingList(data=data, **known))


def _as_bytes(body: EmbeddingBody, vectors: list[array[float]], known: dict[str, Any]) -> Response:
    """vLLM's: one vector behind the other, with all else in the header `metadata` unless only bytes are wanted."""
    found = [packed(vector, body.embed_dtype, body.endianness) for vector in vectors]
    headers = {}
    if body.encoding_format == "bytes":
        ends = list(accumulate(map(len, found)))
        items = [
            PackedVector(
                index=index,
                embed_dtype=body.embed_dtype or "float32",
                endianness=body.endianness or "native",
                start=end - len(found[index]),
                end=end,
                shape=[len(vectors[index])],
            )
            for index, end in enumerate(ends)
        ]
        headers["metadata"] = encode({**known, "data": items}).decode()
    return Response(b"".join(found), headers=headers, media_type="application/octet-stream")


def _check(body: EmbeddingBody) -> None:
    if body.encoding_format not in (None, "float", *PACKED):
        raise field_error("encoding_format", f"must be one of float, {', '.join(PACKED)}")
    check_fields(body)
    if None not in (body.normalize, body.use_activation) and body.normalize != body.use_activation:
        raise field_error("use_activation", "contradicts normalize")
    check_packing(body.encoding_format, body.embed_dtype, body.endianness)


def _normalizes(body: EmbeddingBody) -> bool:
    return body.normalize is not False and body.use_activation is not False


def _pooling(body: EmbeddingBody) -> Pooling:
    kinds = [PoolingKind.LAST.value, PoolingKind.MEAN.value]
    if body.pooling is not None and body.pooling not in kinds:
        raise field_error("pooling", f"must be one of {', '.join(kinds)}")
    return Pooling(PoolingKind(body.pooling or PoolingKind.LAST), _normalizes(body))
