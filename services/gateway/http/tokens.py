"""/tokenize and /detokenize: the tokenizer by itself, with vLLM's fields."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.answers.objects import json_response
from services.gateway.http.conversation.objects import MessageBody
from services.gateway.http.conversation.prompt import read_messages
from services.gateway.http.requests.fields import ClientNames, TokenId
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.reading import converted
from shared.errors import RequestError
from shared.messages import ChatOptions


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    client_names: ClassVar[ClientNames] = {
        "prompt": ("messages", "prompt"),
        "chat": ("messages",),
        "token_ids": ("messages", "prompt"),
    }

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None  # as a chat has them
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None  # the tokens too, as the vocabulary writes them


class DetokenizeBody(msgspec.Struct, kw_only=True):
    client_names: ClassVar[ClientNames] = {"token_ids": ("tokens",), "prompt": ("tokens",)}

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class Tokens:
    """The two endpoints."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def tokenize(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, TokenizeBody)
        gate = self._gate.choose(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("exactly one of prompt and messages must be given", field="prompt")
        if body.messages is None:
            ids = await gate.encode(request, text=body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            chat = read_messages(converted(body.messages, list[MessageBody], "messages"))
            ids = await gate.encode(request, chat=chat, options=_options(body))
        texts = await gate.written(ids) if body.return_token_strs else None
        limit = gate.max_model_len or None
        return json_response(Tokenized(count=len(ids), max_model_len=limit, tokens=ids, token_strs=texts))

    async def detokenize(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, DetokenizeBody)
        gate = self._gate.choose(body.model)
        text = await gate.decode(request, body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return json_response(Detokenized(text))


def _options(body: TokenizeBody) -> ChatOptions:
    continues = bool(body.continue_final_message)
    return ChatOptions(
        tools=msgspec.json.encode(body.tools).decode() if body.tools else "",
        template_args=msgspec.json.encode(body.chat_template_kwargs).decode() if body.chat_template_kwargs else "",
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
    )
