"""/v1/embeddings: texts or token ids in, one vector for each."""

from __future__ import annotations

import base64
from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation.embedding import Embedded, check_inputs, embed, embedding_params, total
from services.gateway.http.answers.events import WholeResponse
from services.gateway.http.answers.objects import encode
from services.gateway.http.requests.fields import ClientNames, Int, TokenId
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.prompts import Prompt, read_prompts
from shared.errors import RequestError
from shared.messages import TokenizeRequest
from shared.pooling import Pooling, PoolingKind


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """OpenAI's fields, vLLM's `normalize` and `add_special_tokens`, and our `pooling`."""

    client_names: ClassVar[ClientNames] = {"prompt": ("input",), "token_ids": ("input",), "label": ("request_id",)}

    input: str | list[str | Int | list[TokenId]]  # a text, token ids, or a list of either
    model: str | None = None
    encoding_format: str | None = None  # float or base64
    dimensions: Int | None = None  # refused
    user: str | None = None  # without effect
    pooling: str | None = None  # last or mean: which hidden states make the vector
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    priority: Int | None = None
    request_id: str | None = None  # a label for logs and Abort


class EmbeddingObject(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
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
        self._gate.check_model(body.model)
        _check(body)
        pooling = _pooling(body)
        prompts = read_prompts(body.input, field="input", at_most=None)
        check_inputs(len(prompts))
        for prompt in prompts:
            await self._look_up(request, body, prompt)

        def make_request(place: int) -> TokenizeRequest:
            prompt = prompts[place]
            header = self._gate.header(request, label=body.request_id, priority=body.priority, place=place)
            ids = None if prompt.token_ids is None else self._gate.pack(prompt.token_ids)
            text = None if prompt.token_ids is not None else prompt.text
            return TokenizeRequest(header, embedding_params(pooling), text=text, token_ids=ids)

        async def answer() -> bytes:
            return self._encode(body, await embed(self._gate.service, len(prompts), make_request))

        return WholeResponse(answer, {})

    async def _look_up(self, request: Request, body: EmbeddingBody, prompt: Prompt) -> None:
        """The ids of a prompt that is not tokenized as others are, or not the whole of it."""
        plain, limit = body.add_special_tokens is False, body.truncate_prompt_tokens
        if prompt.text and (plain or limit is not None):
            prompt.token_ids = await self._gate.encode(request, text=prompt.text, add_special_tokens=not plain)
        if prompt.token_ids is not None:
            prompt.token_ids = self._gate.truncate(prompt.token_ids, limit)

    def _encode(self, body: EmbeddingBody, embedded: list[Embedded]) -> bytes:
        as_text = body.encoding_format == "base64"
        data = [
            EmbeddingObject(
                index=index,
                embedding=base64.b64encode(one.vector).decode() if as_text else one.values().tolist(),
            )
            for index, one in enumerate(embedded)
        ]
        num_tokens = total(embedded)
        usage = EmbeddingUsage(num_tokens, num_tokens)
        return encode(EmbeddingList(data=data, model=self._gate.settings.engine.model_name, usage=usage))


def _check(body: EmbeddingBody) -> None:
    if body.encoding_format not in (None, "float", "base64"):
        raise RequestError("encoding_format must be float or base64", field="encoding_format")
    if body.dimensions is not None:
        raise RequestError("dimensions: shorter vectors are not supported by this server", field="dimensions")


def _pooling(body: EmbeddingBody) -> Pooling:
    kinds = [kind.value for kind in PoolingKind]
    if body.pooling is not None and body.pooling not in kinds:
        raise RequestError(f"pooling must be one of {', '.join(kinds)}", field="pooling")
    return Pooling(PoolingKind(body.pooling or PoolingKind.LAST), body.normalize is not False)
