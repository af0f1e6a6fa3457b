"""Embeddings of the bundled model: transformers' hidden states, pooled, whatever the chunks and the requests beside."""

from __future__ import annotations

import random
from array import array
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from services.scheduler.state.policy import Policy
from shared.messages import AddRequest, RequestHeader
from shared.packing import pack_tokens
from shared.requests.pooling import Pooling, PoolingKind
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.integration.engine import MODEL, Engine, ask

RNG = random.Random(3)
PROMPTS = [[RNG.randrange(4, 4000) for _ in range(length)] for length in (1, 2, 16, 33, 80, 150)]
PROMPTS.append(PROMPTS[-1][:64] + PROMPTS[2])  # begins as another does
POOLINGS = [Pooling(kind, normalize) for kind in (PoolingKind.LAST, PoolingKind.MEAN) for normalize in (True, False)]


class Embedder(Engine):
    """An engine that keeps what comes with the streams."""

    def __init__(self, policy: Policy | None = None, **settings: Any) -> None:
        super().__init__(policy, kv_cache_dtype="float32", **settings)
        self.vectors: dict[str, bytes | None] = {}

    def embed(self, prompts: list[list[int]], pooling: Pooling) -> list[Tensor]:
        ids = [self.ask_for(prompt, pooling) for prompt in prompts]
        self.run()
        assert not self.rejected, self.rejected
        return [torch.tensor(array("f", self.vectors[one] or b"")) for one in ids]

    def ask_for(self, prompt: list[int], pooling: Pooling) -> str:
        params = SamplingParams(pooling=pooling, temperature=0.0, max_tokens=1).resolved(
            GenerationDefaults(), max_tokens=1
        )
        request_id = f"e{len(self.vectors)}"
        self.vectors[request_id] = None
        self.core.add(AddRequest(RequestHeader(request_id, "g"), params, pack_tokens(prompt)), now=0.0)
        return request_id

    def _collect(self) -> None:
        take = self.core.outbound.take_batches
        batches = take()
        for batch in batches.values():
            for stream in batch.opened:
                if stream.header.request_id in self.vectors:
                    self.vectors[stream.header.request_id] = stream.embedding
        self.core.outbound.take_batches = lambda: batches  # type: ignore[method-assign]
        super()._collect()
        self.core.outbound.take_batches = take  # type: ignore[method-assign]


@cache
def states(place: int) -> Tensor:  # [num_tokens, hidden_size]
    from transformers import AutoModel

    model = AutoModel.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([PROMPTS[place]])).last_hidden_state[0]
    return found


def wanted(place: int, pooling: Pooling) -> Tensor:  # [hidden_size]
    hidden = states(place)
    vector = hidden[-1] if pooling.kind is PoolingKind.LAST else hidden.mean(0)
    return torch.nn.functional.normalize(vector, dim=0) if pooling.normalize else vector


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_vectors_are_those_of_transformers(pooling: Pooling, kernels: str) -> None:
    for place, found in enumerate(Embedder(kernels=kernels).embed(PROMPTS, pooling)):
        torch.testing.assert_close(found, wanted(place, pooling), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("pooling", POOLINGS[::2], ids=str)
def test_company_chunks_cache_and_preemption_change_no_vector(pooling: Pooling) -> None:
    alone = [Embedder().embed([prompt], pooling)[0] for prompt in PROMPTS]
    policy = Policy(max_num_batched_tokens=24, long_prefill_token_threshold=10)
    crowd = Embedder(policy, num_blocks=14, max_num_seqs=6, max_model_len=160)
    for seed in range(3):
        crowd.add(ask([seed + 5] * 9, max_tokens=90))
    crowd.embed(PROMPTS, pooling)
    found = crowd.embed(PROMPTS, pooling)
    assert crowd.counters.num_preemptions and crowd.counters.num_chunked_prefills
    if pooling.kind is PoolingKind.LAST:
        assert crowd.counters.num_prefix_cache_hits
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_a_request_for_a_vector_has_one_prompt_and_one_token() -> None:
    embedder = Embedder()
    for params in (SamplingParams(max_tokens=2), SamplingParams(n=2, max_tokens=1), SamplingParams(max_tokens=None)):
        given = params.resolved(GenerationDefaults(), max_tokens=16)
        with_pooling = SamplingParams(pooling=Pooling(), max_tokens=given.max_tokens, n=given.n)
        resolved = with_pooling.resolved(GenerationDefaults(), max_tokens=16)
        embedder.core.add(AddRequest(RequestHeader("r", "g"), resolved, pack_tokens([5, 6])), now=0.0)
        ((_, rejection),) = embedder.core.outbound.take_rejections()
        assert rejection.field == "pooling"
