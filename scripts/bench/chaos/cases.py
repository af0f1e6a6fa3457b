"""What is asked for: requests of every kind whose output is a function of the request alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from protos.pageant.v1 import inference_pb2
from shared.client.client import sampling_proto
from shared.text.pieces import TokenPieces
from shared.text.tokenization import load_tokenizer

OPENINGS = (
    "Once upon a time", "One day, a little dog", "Lily and Tom saw a big", "The end of the", "There was a cat who",
    "In the garden", "Mom said", "A bird flew over",
)  # fmt: skip
PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "siblings": {"temperature": 1.0, "n": 2},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 1},
    "truncated": {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02, "top_k": 50},
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12}, "age": {"type": "integer", "maximum": 130},
        "likes": {"enum": ["dogs", "cats", "the sea"]},
    },
    "required": ["name", "age", "likes"], "additionalProperties": False,
}  # fmt: skip
WORD, PERSON_TOKENS, WORD_TOKENS = "[a-z]{2,8}", 24, 3  # and about how many tokens one of them is
STOP_CHARS = 24  # of a stop string, so that much of it is held back when a service dies


WORDS = (
    "dog", "cat", "tree", "ball", "river", "song", "cake", "boat", "star", "hill", "red", "big", "soft", "old", "ran",
)  # fmt: skip


class Case(msgspec.Struct, frozen=True):
    """One request and what kind it is of."""

    kind: str
    request: Any


def plain_cases(per_kind: int, max_tokens: int) -> list[Case]:
    """Those that need to know nothing of the model's output; lengths vary around `max_tokens`."""
    lengths = [max_tokens * (75 + 50 * index // per_kind) // 100 for index in range(per_kind)]
    return [
        Case(kind, _ask(index, max_tokens=length, ignore_eos=True, **sampling))
        for kind, sampling in PLAIN.items()
        for index, length in enumerate(lengths)
    ]


def adapter_cases(per_kind: int, max_tokens: int, adapters: Sequence[str]) -> list[Case]:
    """Sampled streams of these adapters in turn; none where there are none."""
    made = []
    for index in range(per_kind if adapters else 0):
        request = _ask(index, max_tokens=max_tokens, temperature=0.8, ignore_eos=True)
        request.model = adapters[index % len(adapters)]
        made.append(Case("adapters", request))
    return made


def stop_cases(per_kind: int, max_tokens: int, greedy_texts: list[str]) -> list[Case]:
    """Greedy streams that end at a long stop string, taken from four fifths of the way through the text without it."""
    made = []
    for index in range(per_kind):
        text = greedy_texts[index]
        start = len(text) * 4 // 5
        stops = [text[start : start + STOP_CHARS], "never said"]
        made.append(Case("stop strings", _ask(index, max_tokens=2 * max_tokens, temperature=0.0, stop=stops)))
    return made


def byte_cases(per_kind: int, max_tokens: int, model: Path) -> list[Case]:
    """Streams of tokens that are parts of characters: the decoder is between two bytes nearly always."""
    tokenizer = load_tokenizer(model)
    pieces = TokenPieces(tokenizer)
    broken = [token for token in range(tokenizer.vocab_size) if _is_part(pieces.of(token))]
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True, "allowed_token_ids": broken}
    return [Case("bytes", _ask(index, **sampling)) for index in range(per_kind)]


def grammar_cases(per_kind: int, max_tokens: int) -> list[Case]:
    """Streams held to a format that ends them after about `max_tokens`: a list of objects, or words up to a full stop.

    Every client has a format of its own, so that a process that is started anew has all of them to compile.
    """
    made = []
    for index in range(per_kind):
        if index % 2:
            count = max_tokens // WORD_TOKENS + index
            grammar = {"regex": rf"({WORD} ){{{count}}}{WORD}\."}
        else:
            count = max_tokens // PERSON_TOKENS + index
            schema = {"type": "array", "items": PERSON, "minItems": count, "maxItems": count}
            grammar = {"json_schema": json.dumps(schema)}
        made.append(Case("grammar", _ask(index, max_tokens=2 * max_tokens, temperature=0.8, grammar=grammar)))
    return made


def lengthened(case: Case, num_words: int, seed: int) -> Case:
    """With so many words of its own before the prompt: full blocks that can move."""
    request = type(case.request).FromString(case.request.SerializeToString())
    request.text = " ".join([*random.Random(seed).choices(WORDS, k=num_words), request.text])
    return Case(case.kind, request)


def _is_part(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False


def _ask(index: int, **sampling: Any) -> Any:
    text = f"{OPENINGS[index % len(OPENINGS)]} {'and then ' * (index // len(OPENINGS))}".strip()
    chosen = sampling_proto({"seed": 1000 + index} | sampling)
    return inference_pb2.GenerateRequest(text=text, stream={"return_token_ids": True}, sampling=chosen)
