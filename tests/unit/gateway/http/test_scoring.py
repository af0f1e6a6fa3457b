"""/classify, /score and /rerank: what is asked of the troupe, and how its scores reach the client."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shared.messages import TokenizeRequest
from shared.requests.pooling import Pooling, PoolingKind
from tests.unit.gateway import troupe
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.http.test_embeddings import tell

SCORES = Pooling(PoolingKind.CLASSIFY, True)


async def scored(h: Http, asked: asyncio.Task[Any], scores: dict[str, list[float]]) -> tuple[Any, list[str]]:
    """The answer where each text has these scores, and the texts in the order in which they were asked for."""
    texts = []
    for _ in scores:
        request: TokenizeRequest = await h.troupe.request()
        texts.append(request.text or "")
        tell(h.troupe, request, scores[texts[-1]])
        assert request.params.pooling is not None and request.params.pooling.kind is PoolingKind.CLASSIFY
    response = await asked
    assert response.status_code == 200, response.text
    return response.json(), texts


@pytest.fixture(autouse=True)
def labelled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    labels = getattr(request, "param", ["LABEL_0"])
    monkeypatch.setattr(troupe, "CAPACITY", msgspec.structs.replace(troupe.CAPACITY, labels=labels))


@pytest.mark.parametrize("labelled", [["no", "yes"]], indirect=True)
async def test_classes_have_names_and_probabilities() -> None:
    async with http() as h:
        asked = h.post("/classify", {"input": ["a", "b"]})
        answer, _ = await scored(h, asked, {"a": [0.25, 0.75], "b": [0.5, 0.25]})
        assert answer["data"] == [
            {"index": 0, "label": "yes", "probs": [0.25, 0.75], "num_classes": 2},
            {"index": 1, "label": "no", "probs": [0.5, 0.25], "num_classes": 2},
        ]
        assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6} and answer["object"] == "list"
        status, error = await h.refusal("/score", {"text_1": "a", "text_2": "b"})
        assert (status, error["param"]) == (400, "model") and "2 labels" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"text_1": "q ", "text_2": ["x", "y"]},
        {"queries": ["q "], "documents": ["x", {"text": "y"}]},
        {"data_1": ["q ", "q "], "data_2": ["x", {"content": [{"type": "text", "text": "y"}]}]},
        {"queries": "q ", "items": ["x", "y"]},
    ],
)
async def test_a_pair_is_one_text(body: dict[str, Any]) -> None:
    async with http() as h:
        answer, _ = await scored(h, h.post("/v1/score", body), {"q x": [0.5], "q y": [0.25]})
        assert answer["data"] == [
            {"index": 0, "object": "score", "score": 0.5},
            {"index": 1, "object": "score", "score": 0.25},
        ]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_the_best_documents_come_first(path: str) -> None:
    async with http() as h:
        body = {"query": "q ", "documents": ["x", "y", "z"], "top_n": 2, "model": "tiny"}
        answer, _ = await scored(h, h.post(path, body), {"q x": [0.25], "q y": [0.5], "q z": [0.125]})
        assert answer["results"] == [
            {"index": 1, "document": {"text": "y"}, "relevance_score": 0.5},
            {"index": 0, "document": {"text": "x"}, "relevance_score": 0.25},
        ]
        bare = h.post(path, {"query": "q ", "documents": ["x"], "return_documents": False, "use_activation": False})
        request = await h.troupe.request()
        assert request.params.pooling == Pooling(PoolingKind.CLASSIFY, False)
        tell(h.troupe, request, [3.5])
        assert (await bare).json()["results"] == [{"index": 0, "relevance_score": 3.5}]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": "a", "documents": "b"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [7]}, "text_2[0]"),
        ("/score", {"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "text_2.content[0]"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields"),
        ("/classify", {}, "input"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(path: str, body: dict[str, Any], field: str) -> None:
    async with http() as h:
        status, error = await h.refusal(path, body)
        assert (status, error["param"]) == (400, field)


async def test_one_path_for_all_is_told_apart_by_fields() -> None:
    async with http() as h:
        answer, _ = await scored(h, h.post("/invocations", {"query": "q ", "documents": ["x"]}), {"q x": [0.5]})
        assert answer["results"][0]["relevance_score"] == 0.5
        answer, _ = await scored(h, h.post("/invocations", {"input": "x"}), {"x": [0.5]})
        assert answer["data"][0]["probs"] == [0.5]
        answer, _ = await scored(h, h.post("/pooling", {"input": "x"}), {"x": [0.5]})
        assert answer["data"] == [{"index": 0, "object": "pooling", "data": [0.5]}]
        assert (await h.refusal("/invocations", {"x": 1}))[0] == 400
        assert (await h.refusal("/pooling", {"input": "x", "task": "token_embed"}))[1]["param"] == "task"


@pytest.mark.parametrize("labelled", [[]], indirect=True)
async def test_a_model_that_generates_is_asked_for_chats_and_embeddings() -> None:
    async with http() as h:
        asked = h.post("/invocations", {"messages": [{"role": "user", "content": "Hi"}]})
        request = await h.troupe.request()
        h.troupe.say(request, "fine", **troupe.LAST)
        assert (await asked).json()["choices"][0]["message"]["content"] == "fine"
        asked = h.post("/pooling", {"input": "x"})
        tell(h.troupe, await h.troupe.request(), [0.5, 0.25])
        assert (await asked).json()["data"][0]["data"] == [0.5, 0.25]
