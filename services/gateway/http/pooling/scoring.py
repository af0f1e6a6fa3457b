"""/classify, /score and /rerank: what the head of a model that classifies says of texts, or of pairs of them."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation.embedding import Embedded, total
from services.gateway.http.answers.answer import identity
from services.gateway.http.answers.events import WholeResponse
from services.gateway.http.answers.objects import encode
from services.gateway.http.answers.vectors import check_packing, packed_text, shortened
from services.gateway.http.pooling.inputs import PoolingFields, check_fields, pooled, read_inputs
from services.gateway.http.pooling.objects import (
    ClassifyBody,
    ClassScores,
    PairFields,
    Pooled,
    PooledUsage,
    PoolingBody,
    Ranked,
    RankedText,
    Ranking,
    RerankBody,
    Score,
    ScoreBody,
    Scored,
    ScoredList,
)
from services.gateway.http.pooling.pairs import check_pair_fields, read_pairs, read_text, read_texts
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.prompts import Prompt
from services.gateway.http.requests.reading import field_error
from shared.requests.pooling import Pooling, PoolingKind


class Scoring:
    """The endpoints."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def classify(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, ClassifyBody)
        gate = self._gate.choose(body.model)
        check_fields(body)
        prompts = await read_inputs(gate, request, body)

        def of(index: int, one: Embedded) -> ClassScores:
            scores = one.values().tolist()
            label = gate.labels[max(range(len(scores)), key=scores.__getitem__)]
            return ClassScores(index=index, label=label, probs=scores, num_classes=len(scores))

        return self._list(gate, "classify", body, lambda: self._scores(gate, request, body, prompts), of)

    async def pool(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, PoolingBody)
        gate = self._gate.choose(body.model)
        check_fields(body)
        if body.encoding_format not in (None, "float", "base64"):
            raise field_error("encoding_format", "must be float or base64")
        check_packing(body.encoding_format, body.embed_dtype, body.endianness)
        kinds = {"classify": PoolingKind.CLASSIFY} if gate.labels else {"embed": PoolingKind.LAST}
        kind = kinds.get(body.task) if body.task else next(iter(kinds.values()))
        if kind is None:
            raise field_error("task", f"must be {next(iter(kinds))} with this model")
        prompts = await read_inputs(gate, request, body)
        pooling = Pooling(kind, body.use_activation is not False)

        def of(index: int, one: Embedded) -> Pooled:
            vector = shortened(one.values(), body.dimensions, normalize=pooling.normalize)
            as_text = body.encoding_format == "base64"
            data = packed_text(vector, body.embed_dtype, body.endianness) if as_text else vector.tolist()
            return Pooled(index=index, data=data)

        return self._list(gate, "pool", body, lambda: pooled(gate, request, body, prompts, pooling), of)

    async def score(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, ScoreBody)
        gate = self._gate.choose(body.model)
        self._check_pairs(gate, body)
        pairs = read_pairs(body)

        def of(index: int, one: Embedded) -> Score:
            return Score(index=index, score=one.values()[0])

        return self._list(gate, "score", body, lambda: self._pair_scores(gate, request, body, pairs), of)

    async def rerank(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, RerankBody)
        gate = self._gate.choose(body.model)
        self._check_pairs(gate, body)
        if body.top_n is not None and body.top_n < 0:
            raise field_error("top_n", f"must be a non-negative integer, got {body.top_n}")
        query, documents = read_text(body.query, "query"), read_texts(body.documents, "documents")

        async def answer() -> bytes:
            found = await self._pair_scores(gate, request, body, [(query, document) for document in documents])
            results = [
                Ranked(
                    index=index,
                    document=UNSET if body.return_documents is False else RankedText(text=documents[index]),
                    relevance_score=one.values()[0],
                )
                for index, one in enumerate(found)
            ]
            results.sort(key=lambda one: -one.relevance_score)
            return encode(
                Ranking(
                    id=f"rerank-{uuid.uuid4().hex}",
                    model=gate.model_name(body.model),
                    usage=_usage(found),
                    results=results[: body.top_n or None],
                )
            )

        return WholeResponse(answer, {})

    def _check_pairs(self, gate: Gate, body: PairFields) -> None:
        check_fields(body)
        check_pair_fields(body)
        if len(gate.labels) > 1:
            raise field_error(
                "model", f"has {len(gate.labels)} labels, and a score needs a model of one; ask /classify"
            )

    async def _pair_scores(
        self, gate: Gate, request: Request, body: PairFields, pairs: list[tuple[str, str]]
    ) -> list[Embedded]:
        """A decoder reads a pair as one text, the second right behind the first."""
        limits = (body.max_tokens_per_query or 0, body.max_tokens_per_doc or 0)
        prompts = []
        for pair in pairs:
            parts = [await self._cut(gate, request, text, limit) for text, limit in zip(pair, limits, strict=True)]
            prompts.append(Prompt(text="".join(parts)))
        return await self._scores(gate, request, body, prompts)

    async def _cut(self, gate: Gate, request: Request, text: str, limit: int) -> str:
        """The first tokens of a text; 0: all."""
        if not limit:
            return text
        ids = await gate.encode(request, text=text, add_special_tokens=False)
        return await gate.decode(request, ids[:limit], skip_special_tokens=False) if len(ids) > limit else text

    async def _scores(self, gate: Gate, request: Request, body: PoolingFields, prompts: list[Prompt]) -> list[Embedded]:
        pooling = Pooling(PoolingKind.CLASSIFY, body.use_activation is not False)
        return await pooled(gate, request, body, prompts, pooling)

    def _list(
        self,
        gate: Gate,
        prefix: str,
        body: PoolingFields,
        pool: Callable[[], Awaitable[list[Embedded]]],
        of: Callable[[int, Embedded], Scored],
    ) -> Response:
        """What is made `of` each vector."""

        async def answer() -> bytes:
            found = await pool()
            data = [of(index, one) for index, one in enumerate(found)]
            known = identity(prefix, gate.model_name(body.model))
            return encode(ScoredList(**known, data=data, usage=_usage(found)))

        return WholeResponse(answer, {})


def _usage(found: list[Embedded]) -> PooledUsage:
    return PooledUsage(total(found), total(found))
