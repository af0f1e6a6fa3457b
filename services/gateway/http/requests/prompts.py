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


def read_prompts(
    prompt: str | Sequence[Any], *, field: str = "prompt", at_most: int | None = MAX_PROMPTS
) -> list[Prompt]:
    """Raises RequestError, naming `field`, on an empty or mixed list, and on more prompts than one request may have."""
    if isinstance(prompt, str):
        return [Prompt(text=prompt)]
    return _read_list(prompt, field, at_most)


def _read_list(prompt: Sequence[Any], field: str, at_most: int | None) -> list[Prompt]:
    if not prompt:
        raise RequestError(f"{field} must not be empty", field=field)
    if _are_ids(prompt, field):
        return [Prompt(token_ids=list(prompt))]
    if at_most is not None and len(prompt) > at_most:
        raise RequestError(f"{field} has {len(prompt)} entries, more than {at_most}", field=field)
    if all(isinstance(one, str) for one in prompt):
        return [Prompt(text=one) for one in prompt]
    if all(isinstance(one, list) for one in prompt):
        return [Prompt(token_ids=one) for one in prompt]
    raise RequestError(f"{field} must be all text, all token ids, or all lists of token ids", field=field)


def _are_ids(prompt: Sequence[Any], field: str) -> bool:
    if not all(isinstance(one, int) for one in prompt):
        return False
    wrong = next((one for one in prompt if not 0 <= one <= MAX_TOKEN_ID), None)
    if wrong is not None:
        raise RequestError(f"{field} contains token id {wrong}, which is out of vocabulary", field=field)
    return True
