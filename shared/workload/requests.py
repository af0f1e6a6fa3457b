"""One request of a workload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shared.workload.prompts import Prompt


class LoadRequest(msgspec.Struct, frozen=True):
    """`num_prompt_tokens` is 0 where only the server can know it (text)."""

    prompt: Prompt
    num_prompt_tokens: int
    max_tokens: int
    time: float = 0.0  # seconds after the start at which it is meant to be sent
    tenant: str = ""


def at_times(requests: Sequence[LoadRequest], times: Iterable[float]) -> list[LoadRequest]:
    """The same requests, sent at these times.  Raises ValueError where there are not as many times."""
    pairs = zip(requests, times, strict=True)
    return [msgspec.structs.replace(request, time=time) for request, time in pairs]
