"""Bodies made at random from the official clients' own descriptions of them: none is a defect of ours, and what is not
served is refused by a name that the client knows.
"""

from __future__ import annotations

import asyncio
import json
import random
import types
import typing
from array import array
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import typing_extensions
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from shared.errors import RequestError
from shared.messages import (
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    EncodeResult,
    PiecesRequest,
    PiecesResult,
    RequestRejected,
    TokenizeRequest,
    TokenLogprobs,
)
from shared.packing import pack_tokens, unpack_tokens
from shared.requests.sampling import Limits, check_sampling
from shared.transport import Inbox
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.http.official import PARSERS
from tests.unit.gateway.troupe import LAST

NUM_BODIES = 100
OFTEN, SELDOM = 0.3, 0.03  # how often a field that may be missing is there: in what holds others, and in a body
DEEPEST = 6
REQUIRED: tuple[Any, ...] = (typing_extensions.Required, typing.Required)
DESCRIPTIONS: dict[str, Any] = {
    "/v1/chat/completions": ChatParams,
    "/v1/completions": CompletionCreateParamsNonStreaming,
    "/v1/embeddings": EmbeddingCreateParams,
    "/v1/responses": ResponseCreateParamsNonStreaming,
    "/v1/messages": MessageCreateParamsNonStreaming,
    "/v1/messages/count_tokens": MessageCountTokensParams,
}
TEXTS = ("user", "text", "tiny", "Once", "", "{}", "\ud83d\ude00", "call_1", "x" * 300)


def made(hint: Any, drawn: random.Random, depth: int = 0) -> Any:
    """A value of an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (*REQUIRED, typing.Annotated):
        return made(arguments[0], drawn, depth)
    if origin is Literal:
        return drawn.choice(arguments)
    if origin in (Union, types.UnionType):
        return made(drawn.choice(arguments), drawn, depth)
    if typing_extensions.is_typeddict(hint):
        return of_fields(hint, drawn, depth)
    if origin is dict:
        return {drawn.choice(TEXTS): made(arguments[1], drawn, depth + 1) for _ in range(drawn.randrange(3))}
    if isinstance(origin, type) and issubclass(origin, Iterable):
        count = 0 if depth > DEEPEST else drawn.randrange(3)
        return [made(arguments[0], drawn, depth + 1) for _ in range(count)]
    simple: dict[Any, Any] = {
        str: drawn.choice(TEXTS),
        int: drawn.choice((0, 1, 3, 17, -1, 2**40)),
        float: drawn.choice((0.0, 0.5, 1.0, -3.5, 1e9)),
        bool: drawn.random() < 0.5,
        type(None): None,
    }
    return simple.get(hint, drawn.choice(({}, "x", 7, None)))


def of_fields(kind: Any, drawn: random.Random, depth: int = 0) -> dict[str, Any]:
    """An object with the fields that it needs, and some of the others."""
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    chance = SELDOM if depth == 0 else OFTEN if depth < DEEPEST else 0.0
    chosen = [
        name for name in hints if name == "input" or get_origin(hints[name]) in REQUIRED or drawn.random() < chance
    ]
    return {name: made(hints[name], drawn, depth + 1) for name in chosen}


def refused(request: TokenizeRequest) -> RequestRejected | None:
    """What the tokenizer and the scheduler say of parameters out of their range."""
    try:
        check_sampling(request.params, Limits(vocab_size=1000, max_model_len=512, max_input_length=500), 1)
    except RequestError as error:
        return RequestRejected(request.header.request_id, error.code, str(error), error.field)
    return None


async def answer(h: Http, inbox: Inbox[Any]) -> None:
    """The troupe's part, whatever is asked."""
    while True:
        for message in await inbox.recv_batch():
            h.troupe.tells_ids(message)
            match message:
                case EncodeRequest():
                    h.troupe.tell(EncodeResult(message.request_id, pack_tokens([1, 2])))
                case DecodeRequest():
                    h.troupe.tell(DecodeResult(message.request_id, "x"))
                case PiecesRequest():
                    ids = unpack_tokens(message.token_ids)
                    h.troupe.tell(PiecesResult(message.request_id, [b"x"] * len(ids)))
                case TokenizeRequest() if refusal := refused(message):
                    h.troupe.tell(refusal)
                case TokenizeRequest():
                    wants, entry = message.params.logprobs is not None, TokenLogprobs([7], [-0.5], 1)
                    vector = array("f", [0.5, 0.25]).tobytes() if message.params.pooling is not None else None
                    for index in range(message.params.n):
                        more = LAST | {
                            "index": index,
                            "token_ids": [7],
                            "embedding": vector,
                            "logprobs": [entry] * wants,
                        }
                        h.troupe.say(message, '<think>a</think>{"place": "x', **more)


@pytest.mark.parametrize("path", DESCRIPTIONS)
async def test_no_official_body_is_a_defect(path: str) -> None:
    drawn, statuses = random.Random(path), []
    async with http(**PARSERS) as h:
        answering = [asyncio.create_task(answer(h, inbox)) for inbox in h.troupe.tokenizers.values()]
        for _ in range(NUM_BODIES):
            body = of_fields(DESCRIPTIONS[path], drawn) | {"model": "tiny", "stream": False}
            response = await h.post(path, json.dumps(body).encode())
            statuses.append(response.status_code)
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code != 200:
                param = response.json()["error"]["param"]
                assert param and param.split(".")[0].split("[")[0] in {*body, "input"}, (param, body, response.text)
        for task in answering:
            task.cancel()
        assert not len(h.troupe.gateway.generation.journal)
    assert statuses.count(200) and statuses.count(400)
