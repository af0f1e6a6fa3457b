"""Real prompts as token ids, and the ways in which a proof samples from them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.pageant.v1 import inference_pb2
from scripts.bench.common.deployment import Request
from shared.tokenization import load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
SPEC_BENCH = Path("prompts") / "spec-bench.jsonl"

# What each kind of request is sampled with.  `mixed` goes through these one after the other, by the prompt's number.
TEMPERATURES = {"T=0": 0.0, "T=0.7": 0.7, "T=1.0": 1.0}
MIXED = "mixed"
MIXTURE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 1.0, "ignore_eos": True},
    {"temperature": 0.7, "min_tokens": 20, "logit_bias": {10: 2.0}},
    {"temperature": 1.0, "stop": ["."]},
)
KINDS = (*TEMPERATURES, MIXED)


@dataclass(frozen=True)
class Prompts:
    """Token ids of every prompt, short enough for the model and what it is to generate."""

    token_ids: list[list[int]]
    num_tokens: int  # to generate, at most

    def requests(self, kind: str) -> list[Request]:
        """The same for the same kind: the seed of each is its number."""
        return [self._request(ids, number, kind) for number, ids in enumerate(self.token_ids)]

    def _request(self, ids: list[int], number: int, kind: str) -> Request:
        chosen = MIXTURE[number % len(MIXTURE)] if kind == MIXED else {"temperature": TEMPERATURES[kind]}
        sampling = inference_pb2.SamplingParams(max_tokens=self.num_tokens, seed=number, **chosen)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), sampling=sampling)
        request.stream.return_token_ids = True
        return request


def spec_bench(data: Path, model: Path, *, num_tokens: int, num_prompts: int | None = None) -> Prompts:
    """The first turns of Spec-Bench in a model's ids: the end of each, as much as fits."""
    tokenizer = load_tokenizer(model)
    room = tokenizer.context_length - num_tokens
    with (data / SPEC_BENCH).open(encoding="utf-8") as lines:
        texts = [json.loads(line)["turns"][0] for line in lines][:num_prompts]
    return Prompts([tokenizer.encode(text)[-room:] for text in texts], num_tokens)


def data_directory() -> Path:
    """The shared test data, where it usually is."""
    return Path(os.environ.get("PAGEANT_TEST_DATA") or ROOT.parent / "shared" / "data")
