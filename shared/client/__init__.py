"""A small asynchronous client of the gRPC interface.

    async with Client("127.0.0.1:50051") as client:
        answer = await client.generate("Once upon a time", max_tokens=40)
        print(answer.text, answer.usage.completion_tokens)
        async with client.stream(chat=[("user", "Hi")], temperature=0.7, seed=3) as stream:
            async for delta in stream:
                print(delta.text, end="")

docs/grpc.md has more of it.
"""

from __future__ import annotations

from shared.client.answers import (
    CallError,
    Candidate,
    Delta,
    GeneratedSequence,
    Generation,
    ModelCard,
    TokenScore,
    Usage,
)
from shared.client.client import Client, GenerationStream
from shared.tracing.explanation import Explanation

__all__ = [
    "CallError",
    "Candidate",
    "Client",
    "Delta",
    "Explanation",
    "GeneratedSequence",
    "Generation",
    "GenerationStream",
    "ModelCard",
    "TokenScore",
    "Usage",
]
