"""What embeddings and classes are made of: texts, token ids or a chat, each one prompt."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from starlette.requests import Request

from services.gateway.generation.embedding import Embedded, check_inputs, embed, embedding_params
from services.gateway.http.conversation.objects import MessageBody
from services.gateway.http.conversation.prompt import read_messages
from services.gateway.http.requests.fields import ClientNames, Int, NotSupported, TokenId
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.prompts import Prompt, look_up, read_prompts
from services.gateway.http.requests.reading import converted, field_error
from services.gateway.http.requests.sampling import refuse_impossible
from shared.errors import RequestError
from shared.messages import ChatOptions, TokenizeRequest
from shared.requests.pooling import Pooling


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields of every request that pools hidden states."""

    model: str | None = None
    user: str | None = None  # without effect
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None  # right: keep the first ones
    use_activation: bool | None = None
    priority: Int | None = None
    request_id: str | None = None  # a label for logs and Abort
    cache_salt: str | None = None  # only requests with the same salt share cached prompts, within their tenant
    # not possible here
    mm_processor_kwargs: Annotated[Any, NotSupported("input that is not text")] = None
    chat_template: Annotated[Any, NotSupported("a chat template from a client")] = None
    padding: Any = None


class InputFields(PoolingFields, kw_only=True):
    client_names: ClassVar[ClientNames] = {
        "prompt": ("messages", "input"),
        "chat": ("messages",),
        "token_ids": ("messages", "input"),
        "label": ("request_id",),
    }

    input: str | list[str | Int | list[TokenId]] | None = None  # a text, token ids, or a list of either
    messages: list[Any] | None = None  # instead of it: one chat, as the template renders it
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # default false
    continue_final_message: bool | None = None


def check_fields(body: PoolingFields) -> None:
    refuse_impossible(body)
    if body.padding not in (None, "do_not_pad"):
        raise field_error("padding", "can only be do_not_pad")


async def read_inputs(gate: Gate, request: Request, body: InputFields) -> list[Prompt]:
    if (body.input is None) == (body.messages is None):
        raise RequestError("exactly one of input and messages must be given", field="input")
    if body.messages is None:
        return read_prompts(body.input or [], field="input", at_most=None)
    options = ChatOptions(
        template_args=msgspec.json.encode(body.chat_template_kwargs).decode() if body.chat_template_kwargs else "",
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
    )
    chat = read_messages(converted(body.messages, list[MessageBody], "messages"))
    return [Prompt(token_ids=await gate.encode(request, chat=chat, options=options))]


async def pooled(
    gate: Gate, request: Request, body: PoolingFields, prompts: list[Prompt], pooling: Pooling
) -> list[Embedded]:
    """The vectors of all prompts, in order."""
    check_inputs(len(prompts))
    for prompt in prompts:
        await look_up(gate, request, body, prompt)

    def make_request(place: int) -> TokenizeRequest:
        header = gate.header(request, label=body.request_id, priority=body.priority, place=place)
        return prompts[place].request(gate, header, embedding_params(pooling))

    return await embed(gate.service, len(prompts), make_request)
