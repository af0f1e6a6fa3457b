"""/v1/embeddings and gRPC's Embed: what is asked of the troupe, and how its vectors reach the client."""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Any

import grpc
import pytest

from protos.pageant.v1 import inference_pb2
from shared.errors import RejectCode
from shared.messages import FinishReason, RequestRejected, TokenizeRequest
from shared.packing import unpack_tokens
from shared.requests.pooling import Pooling, PoolingKind
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.troupe import FakeTroupe, failure, front


def tell(troupe: FakeTroupe, request: TokenizeRequest, vector: list[float], num_tokens: int = 3) -> None:
    troupe.say(
        request, "x", embedding=array("f", vector).tobytes(), finish_reason=FinishReason.LENGTH,
        num_prompt_tokens=num_tokens,
    )  # fmt: skip


async def answer_by_length(troupe: FakeTroupe, count: int) -> list[TokenizeRequest]:
    """Answer so many requests with vectors that tell of their texts' lengths, the last first."""
    requests = [await troupe.request() for _ in range(count)]
    for request in reversed(requests):
        tell(troupe, request, [len(request.text or ""), 0.5])
    return requests


async def test_texts_come_back_as_vectors_in_their_order() -> None:
    async with http() as h:
        asked = h.post("/v1/embeddings", {"input": ["a", "bbb", "cc"], "model": "tiny"})
        requests = await answer_by_length(h.troupe, 3)
        answer = (await asked).json()
        assert answer["object"] == "list" and answer["model"] == "tiny"
        assert [one["embedding"] for one in answer["data"]] == [[1.0, 0.5], [3.0, 0.5], [2.0, 0.5]]
        assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", n) for n in range(3)]
        assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
        params = requests[0].params
        assert (params.pooling, params.max_tokens, params.n) == (Pooling(PoolingKind.LAST, True), 1, 1)


@pytest.mark.parametrize(("given", "ids"), [([1, 2, 3], [[1, 2, 3]]), ([[4], [5, 6]], [[4], [5, 6]])])
async def test_token_ids_are_inputs_too(given: Any, ids: list[list[int]]) -> None:
    async with http() as h:
        asked = h.post("/v1/embeddings", {"input": given, "pooling": "mean", "normalize": False})
        for _ in ids:
            request = await h.troupe.request()
            assert unpack_tokens(request.token_ids or b"") in ids
            assert request.params.pooling == Pooling(PoolingKind.MEAN, False)
            tell(h.troupe, request, [0.25])
        assert len((await asked).json()["data"]) == len(ids)


async def test_base64_is_the_same_numbers() -> None:
    async with http() as h:
        asked = h.post("/v1/embeddings", {"input": "a", "encoding_format": "base64"})
        tell(h.troupe, await h.troupe.request(), [0.1, -3.5])
        (one,) = (await asked).json()["data"]
        assert array("f", base64.b64decode(one["embedding"])) == array("f", [0.1, -3.5])


async def test_only_the_end_of_an_input() -> None:
    async with http() as h:
        asked = h.post("/v1/embeddings", {"input": ["Once upon"], "truncate_prompt_tokens": 1})
        await h.answer_encode([7, 8])
        request = await h.troupe.request()
        assert unpack_tokens(request.token_ids or b"") == [8]
        tell(h.troupe, request, [0.5])
        assert (await asked).status_code == 200


async def test_texts_without_special_tokens() -> None:
    async with http() as h:
        asked = h.post("/v1/embeddings", {"input": "Once", "add_special_tokens": False})
        assert (await h.answer_encode([7, 8])).add_special_tokens is False
        request = await h.troupe.request()
        assert unpack_tokens(request.token_ids or b"") == [7, 8]
        tell(h.troupe, request, [1.0])
        assert (await asked).status_code == 200


async def test_a_long_list_is_not_all_open_at_once() -> None:
    async with http() as h:
        asked = h.post("/v1/embeddings", {"input": ["a"] * 100})
        most = 0
        for _ in range(100):
            request = await h.troupe.request()
            most = max(most, len(h.troupe.gateway.generation.journal))
            tell(h.troupe, request, [1.0])
        assert len((await asked).json()["data"]) == 100
        assert 1 < most <= 32


async def test_one_that_is_refused_ends_all() -> None:
    async with http() as h:
        await _refuse_one(h)
        assert len(h.troupe.gateway.generation.journal) == 0


async def _refuse_one(h: Http) -> None:
    asked = h.post("/v1/embeddings", {"input": ["a", "b"]})
    await h.troupe.request()
    request = await h.troupe.request()
    rejection = RequestRejected(request.header.request_id, RejectCode.INVALID_ARGUMENT, "prompt is long", "prompt")
    h.troupe.tell(rejection)
    response = await asked
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


async def test_grpc_embeds_too() -> None:
    async with front() as f:
        inputs: list[dict[str, Any]] = [{"text": "abcd"}, {"token_ids": {"ids": [9, 8]}}]
        proto = inference_pb2.EmbedRequest(inputs=inputs, pooling=inference_pb2.POOLING_MEAN, normalize=False)
        asked = asyncio.ensure_future(f.inference.Embed(proto))
        found = [await f.troupe.request() for _ in range(2)]
        assert [request.params.pooling for request in found] == [Pooling(PoolingKind.MEAN, False)] * 2
        for request in found:
            tell(f.troupe, request, [4.0] if request.text else [2.0])
        response = await asked
        assert [list(one.values) for one in response.embeddings] == [[4.0], [2.0]]
        assert response.usage.prompt_tokens == 6


@pytest.mark.parametrize(("given", "field"), [({}, "input"), ({"inputs": [{}]}, "input")])
async def test_grpc_names_what_it_refuses(given: dict[str, Any], field: str) -> None:
    async with front() as f:
        error = await failure(f.inference.Embed(inference_pb2.EmbedRequest(**given)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(error.trailing_metadata())["error-field"] == field
