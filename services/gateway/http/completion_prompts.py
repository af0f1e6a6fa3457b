"""The prompts of one completion request: a text, ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.errors import RequestError

MAX_PROMPTS = 256  # in one request: each is a stream of its own
MAX_TOKEN_ID = 2**31 - 1


class Prompt(msgspec.Struct):
    """One prompt; `token_ids` are known where the client gave them, or where the answer is to tell of them."""

    text: str | None = None
    token_ids: list[int] | None = None
    shown: str = ""  # what the answer begins with, where it echoes


def read_prompts(prompt: str | Sequence[Any]) -> list[Prompt]:
    """Raises RequestError on an empty or mixed list, and on more prompts than one request may have."""
    if isinstance(prompt, str):
        return [Prompt(text=prompt)]
    return _read_list(prompt)


def _read_list(prompt: Sequence[Any]) -> list[Prompt]:
    if not prompt:
        raise RequestError("prompt must not be empty", field="prompt")
    if _are_ids(prompt):
        return [Prompt(token_ids=list(prompt))]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(prompt)} entries, more than {MAX_PROMPTS}", field="prompt")
    if all(isinstance(one, str) for one in prompt):
        return [Prompt(text=one) for one in prompt]
    if all(isinstance(one, list) for one in prompt):
        return [Prompt(token_ids=one) for one in prompt]
    raise RequestError("prompt must be all text, all token ids, or all lists of token ids", field="prompt")


def _are_ids(prompt: Sequence[Any]) -> bool:
    if not all(isinstance(one, int) for one in prompt):
        return False
    if any(not 0 <= one <= MAX_TOKEN_ID for one in prompt):
        raise RequestError("prompt contains a number that is no token id", field="prompt")
    return True
