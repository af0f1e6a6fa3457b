"""What /classify, /score and /rerank read and answer: vLLM's fields, and those of Jina and Cohere."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.http.pooling.inputs import InputFields, PoolingFields
from services.gateway.http.requests.fields import ClientNames, Int, NotSupported

Texts = Any  # a text, an object with `text`, or with `content` of text parts; or a list of these


class ClassifyBody(InputFields, kw_only=True):
    """`use_activation` false: logits in place of probabilities."""


class PoolingBody(InputFields, kw_only=True):
    """vLLM's: what a model makes of inputs, whatever that is."""

    task: str | None = None  # embed or classify; default: what the model does
    encoding_format: str | None = None  # float or base64
    dimensions: Int | None = None  # of an embedding
    embed_dtype: str | None = None
    endianness: str | None = None


class PairFields(PoolingFields, kw_only=True):
    client_names: ClassVar[ClientNames] = {"label": ("request_id",)}

    max_tokens_per_query: Int | None = None  # keep so many first tokens of it; 0: all
    max_tokens_per_doc: Int | None = None
    # not possible here
    instruction: Annotated[Any, NotSupported("a template for pairs")] = None
    chat_template_kwargs: Annotated[Any, NotSupported("a template for pairs")] = None


class ScoreBody(PairFields, kw_only=True):
    """Pairs of texts, of which one may stand for many: `text_1` and `text_2`, or other names for them."""

    client_names: ClassVar[ClientNames] = {
        **PairFields.client_names,
        "prompt": ("text_2", "documents", "items", "data_2"),
        "token_ids": ("text_2", "documents", "items", "data_2"),
    }

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None


class RerankBody(PairFields, kw_only=True):
    client_names: ClassVar[ClientNames] = {
        **PairFields.client_names,
        "prompt": ("documents",),
        "token_ids": ("documents",),
    }

    query: Texts
    documents: Texts
    top_n: Int | None = None  # so many of the best; 0: all
    return_documents: bool | None = None  # default true
    # not possible here
    rank_fields: Annotated[Any, NotSupported("documents of several fields")] = None


class PooledUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class ClassScores(msgspec.Struct, kw_only=True):
    index: int
    label: str  # of the highest score
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class Pooled(msgspec.Struct, kw_only=True):
    index: int
    object: str = "pooling"
    data: list[float] | str


Scored = TypeVar("Scored", ClassScores, Score, Pooled)


class ScoredList(msgspec.Struct, Generic[Scored], kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Scored]
    usage: PooledUsage


class RankedText(msgspec.Struct, kw_only=True):
    text: str


class Ranked(msgspec.Struct, kw_only=True):
    index: int  # among the documents of the request
    document: RankedText | UnsetType = UNSET
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: PooledUsage
    results: list[Ranked]  # the best first
