"""What a chat's body says of its rendering: variables of the template, and where the answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.http.chat.objects import ChatBody
from services.gateway.http.requests.fields import TokenId
from services.gateway.http.requests.reading import converted
from shared.messages import ChatMessage


def variables_of(body: ChatBody) -> dict[str, Any]:
    """Of the template."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


def given_prompt(body: ChatBody) -> list[int]:
    """The prompt where its token ids come with the chat: a router has them from the worker that computed the prompt.
    Empty where they do not, or where more than that is asked for, which is not possible here."""
    params = body.kv_transfer_params
    if not isinstance(params, dict) or params.keys() != {"prompt_token_ids"}:
        return []
    return converted(params["prompt_token_ids"], list[TokenId], "kv_transfer_params.prompt_token_ids")


def begins_a_message(body: ChatBody) -> bool:
    """Whether the answer is a message of its own, and does not go on with the last one."""
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


def echoed(body: ChatBody, messages: Sequence[ChatMessage]) -> str:
    """What an answer shows before its own words where that is wanted: the last message, if it is of the same role."""
    is_of_same_role = messages[-1].role == "assistant" or not begins_a_message(body)
    return messages[-1].content if body.echo and is_of_same_role else ""
