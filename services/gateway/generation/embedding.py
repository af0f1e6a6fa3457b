"""Embeddings of many inputs in one call, for every front: each is a request of its own, admitted like all others."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

import msgspec

from services.gateway.generation.service import GenerationService
from services.gateway.generation.tasks import all_or_none
from services.gateway.streams.stream import Stream
from shared.errors import RejectCode, RequestError
from shared.messages import TokenizeRequest
from shared.requests.pooling import Pooling
from shared.requests.sampling import SamplingParams

MAX_INPUTS = 2048  # of one call, OpenAI's number
MAX_OPEN = 32  # of one call at a time, so that a long list does not fill the queue by itself


class Embedded(msgspec.Struct, frozen=True):
    """One input's vector, packed float32, and what it took."""

    vector: bytes
    num_tokens: int
    num_cached_tokens: int

    def values(self) -> array[float]:
        return array("f", self.vector)


def embedding_params(pooling: Pooling) -> SamplingParams:
    """With the prompt's embedding comes one token, which no client is shown."""
    return SamplingParams(temperature=0.0, max_tokens=1, seed=0, detokenize=False, speculate=False, pooling=pooling)


def check_inputs(count: int) -> None:
    """Raise RequestError unless there is something to embed, and not too much."""
    if not 1 <= count <= MAX_INPUTS:
        raise RequestError(f"input must have between 1 and {MAX_INPUTS} entries, got {count}", field="input")


async def embed(
    service: GenerationService, count: int, make_request: Callable[[int], TokenizeRequest]
) -> list[Embedded]:
    """The vectors of all inputs, in order; `make_request` is asked for each one's request when its turn comes.

    The first that is refused or fails ends all, with its RequestError.  Being cancelled aborts them.
    """
    found: dict[int, Embedded] = {}
    turns = asyncio.Semaphore(MAX_OPEN)

    async def one(place: int) -> None:
        async with turns:
            found[place] = await _embed(service, make_request(place))

    await all_or_none([one(place) for place in range(count)])
    return [found[place] for place in range(count)]


async def _embed(service: GenerationService, request: TokenizeRequest) -> Embedded:
    found: list[Embedded] = []

    async def deliver(stream: Stream) -> None:
        while deltas := await stream.take():
            vectors = (delta.end.embedding for delta in deltas if delta.end is not None)
            tokens = stream.num_prompt_tokens, stream.num_cached_tokens
            found.extend(Embedded(vector, *tokens) for vector in vectors if vector)

        if not found and stream.error is None:
            raise RequestError("a worker has computed no embedding", code=RejectCode.INTERNAL)

    await service.generate(request, deliver)
    return found[0]


def total(embedded: Sequence[Embedded]) -> int:
    """Tokens of all inputs."""
    return sum(one.num_tokens for one in embedded)
