"""The prompts of one request: a text, ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.reading import field_error
from shared.messages import RequestHeader, TokenizeRequest
from shared.requests.sampling import SamplingParams

MAX_PROMPTS = 256  # in one request: each is a stream of its own
MAX_TOKEN_ID = 2**31 - 1


class Prompt(msgspec.Struct):
    """One prompt; `token_ids` are known where the client gave them, or where the answer is to tell of them."""

    text: str | None = None
    token_ids: list[int] | None = None
    shown: str = ""  # what the answer begins with, where it echoes

    def request(self, gate: Gate, header: RequestHeader, params: SamplingParams) -> TokenizeRequest:
        if self.token_ids is None:
            return TokenizeRequest(header, params, text=self.text)
        return TokenizeRequest(header, params, token_ids=gate.pack(self.token_ids))


async def look_up(gate: Gate, request: Request, body: Any, prompt: Prompt, *, tells: bool = False) -> None:
    """The ids of a prompt that is not tokenized as others are, or not the whole of it, or of which the answer `tells`
    them.  `body` says so in `add_special_tokens`, `truncate_prompt_tokens` and `truncation_side`."""
    plain, limit = body.add_special_tokens is False, body.truncate_prompt_tokens
    if prompt.text and (tells or plain or limit is not None):
        prompt.token_ids = await gate.encode(request, text=prompt.text, add_special_tokens=not plain)
    if prompt.token_ids is not None:
        kept = gate.truncate(prompt.token_ids, limit, body.truncation_side)
        if len(kept) < len(prompt.token_ids):
            prompt.token_ids, prompt.text = kept, None


def read_prompts(prompt: str | list[Any], *, field: str = "prompt", at_most: int | None = MAX_PROMPTS) -> list[Prompt]:
    """Raises RequestError, naming `field`, on an empty or mixed list, and on more prompts than one request may have."""
    if isinstance(prompt, str):
        return [Prompt(text=prompt)]
    if not prompt:
        raise field_error(field, "must not be empty")
    if _are_ids(prompt, field):
        return [Prompt(token_ids=list(prompt))]
    if at_most is not None and len(prompt) > at_most:
        raise field_error(field, f"has {len(prompt)} entries, more than {at_most}")
    if all(isinstance(one, str) for one in prompt):
        return [Prompt(text=one) for one in prompt]
    if all(isinstance(one, list) for one in prompt):
        return [Prompt(token_ids=one) for one in prompt]
    raise field_error(field, "must be all text, all token ids, or all lists of token ids")


def _are_ids(prompt: Sequence[Any], field: str) -> bool:
    if not all(isinstance(one, int) for one in prompt):
        return False
    wrong = next((one for one in prompt if not 0 <= one <= MAX_TOKEN_ID), None)
    if wrong is not None:
        raise field_error(field, f"contains token id {wrong}, which is out of vocabulary")
    return True
