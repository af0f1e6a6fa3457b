"""What each operation reads and answers.  Left out are the page and what an operator orders: a program that tries every
operation of a description restarts nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.http.adapters import LoadBody, UnloadBody
from services.gateway.http.batches.objects import Batch, BatchBody, BatchList
from services.gateway.http.chat.objects import ChatBody, ChatChoice, ChatCompletion, ChunkChoice
from services.gateway.http.completions.endpoint import Completion, CompletionBody
from services.gateway.http.embeddings import EmbeddingBody, EmbeddingList
from services.gateway.http.files.objects import DeletedFile, FileList, FileObject
from services.gateway.http.messages.objects import AnsweredMessage, MessagesBody, MessagesPrompt, TokenCount
from services.gateway.http.operations import Health, ListedModel, Models, ServerLoad, ServerVersion
from services.gateway.http.pooling.objects import (
    ClassifyBody,
    ClassScores,
    Pooled,
    PoolingBody,
    Ranking,
    RerankBody,
    Score,
    ScoreBody,
    ScoredList,
)
from services.gateway.http.responses.objects import DeletedResponse, InputItems, ResponseObject, ResponsesBody
from services.gateway.http.tokens import DetokenizeBody, Detokenized, TokenizeBody, Tokenized

JSON, EVENTS, TEXT, OCTETS = "application/json", "text/event-stream", "text/plain", "application/octet-stream"
FORM = "multipart/form-data"
ANY_OBJECT: dict[str, Any] = {"type": "object"}
PAGE = {"after": "string", "limit": "integer", "order": "string"}  # of a list
UPLOAD: dict[str, Any] = {  # a form has no struct
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
    "required": ["file", "purpose"],
}


@dataclass(frozen=True)
class Operation:
    """`body` and `answer` are structs, several where there is a choice, or schemas."""

    summary: str
    body: Any = None
    answer: Any = None  # of JSON
    streams: Any = None  # a struct of an event, or a schema, where it may answer with a stream of events
    others: tuple[str, ...] = ()  # further kinds of answers, by content type
    reads: str = JSON
    query: dict[str, str] | None = None  # optional parameters with their types
    statuses: tuple[int, ...] = ()  # that have the same answer as 200


COMPLETION = Operation("Continues texts", CompletionBody, Completion, streams=Completion)
CHAT = Operation("Answers a chat", ChatBody, ChatCompletion[ChatChoice], streams=ChatCompletion[ChunkChoice])
EMBEDDING = Operation("Vectors of texts or of a chat", EmbeddingBody, EmbeddingList, others=(OCTETS,))
CLASSIFY = Operation("Labels' probabilities", ClassifyBody, ScoredList[ClassScores])
SCORE = Operation("Scores of pairs", ScoreBody, ScoredList[Score])
RERANK = Operation("Documents by their scores", RerankBody, Ranking)
INVOCATION = Operation(
    "A body of another operation, told apart by its fields",
    tuple(one.body for one in (CHAT, COMPLETION, EMBEDDING, RERANK, SCORE, CLASSIFY)),
    ANY_OBJECT,
    streams=ANY_OBJECT,
    others=(OCTETS,),
)

OPERATIONS: dict[tuple[str, str], Operation] = {  # by method and route
    ("POST", "/v1/completions"): COMPLETION,
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/responses"): Operation("Answers items", ResponsesBody, ResponseObject, streams=ANY_OBJECT),
    ("GET", "/v1/responses/{response_id}"): Operation("A stored response, or one that runs", answer=ResponseObject),
    ("DELETE", "/v1/responses/{response_id}"): Operation("Deletes a response", answer=DeletedResponse),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation("Ends a response that runs", answer=ResponseObject),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        "What a response was made from", answer=InputItems, query=PAGE
    ),
    ("POST", "/v1/messages"): Operation("Anthropic's messages", MessagesBody, AnsweredMessage, streams=ANY_OBJECT),
    ("POST", "/v1/messages/count_tokens"): Operation("Tokens of a prompt", MessagesPrompt, TokenCount),
    ("POST", "/v1/embeddings"): EMBEDDING,
    ("POST", "/pooling"): Operation("What a model makes of inputs", PoolingBody, ScoredList[Pooled]),
    ("POST", "/invocations"): INVOCATION,
    **{("POST", f"{beneath}/classify"): CLASSIFY for beneath in ("", "/v1")},
    **{("POST", f"{beneath}/score"): SCORE for beneath in ("", "/v1")},
    **{("POST", f"{beneath}/rerank"): RERANK for beneath in ("", "/v1", "/v2")},
    ("POST", "/v1/files"): Operation("Takes a file", UPLOAD, FileObject, reads=FORM),
    ("GET", "/v1/files"): Operation("The caller's files", answer=FileList, query={**PAGE, "purpose": "string"}),
    ("GET", "/v1/files/{file_id}"): Operation("A file", answer=FileObject),
    ("DELETE", "/v1/files/{file_id}"): Operation("Deletes a file", answer=DeletedFile),
    ("GET", "/v1/files/{file_id}/content"): Operation("What a file has", others=(OCTETS,)),
    ("POST", "/v1/batches"): Operation("Begins a batch", BatchBody, Batch),
    ("GET", "/v1/batches"): Operation("The caller's batches", answer=BatchList, query=PAGE),
    ("GET", "/v1/batches/{batch_id}"): Operation("A batch", answer=Batch),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation("Ends a batch", answer=Batch),
    ("GET", "/v1/models"): Operation("What is served", answer=Models),
    ("GET", "/v1/models/{name:path}"): Operation("One of them", answer=ListedModel),
    ("POST", "/v1/load_lora_adapter"): Operation("Loads an adapter", LoadBody, others=(TEXT,)),
    ("POST", "/v1/unload_lora_adapter"): Operation("Unloads an adapter", UnloadBody, others=(TEXT,)),
    ("POST", "/tokenize"): Operation("Tokens of a text or of a chat", TokenizeBody, Tokenized),
    ("POST", "/detokenize"): Operation("The text of tokens", DetokenizeBody, Detokenized),
    ("GET", "/health"): Operation(
        "Whether requests are served now", answer=Health, query={"model": "string"}, statuses=(503,)
    ),
    **{
        (method, "/ping"): Operation("/health, under SageMaker's name", answer=Health, statuses=(503,))
        for method in ("GET", "POST")
    },
    ("GET", "/version"): Operation("The server's version", answer=ServerVersion),
    ("GET", "/load"): Operation("Generations under way at this gateway", answer=ServerLoad),
    ("GET", "/tokenizer_info"): Operation(
        "The tokenizer's configuration", answer=ANY_OBJECT, query={"model": "string"}
    ),
    ("GET", "/metrics"): Operation("Prometheus' text", others=(TEXT,)),
    ("GET", "/openapi.json"): Operation("This description", answer=ANY_OBJECT),
}
