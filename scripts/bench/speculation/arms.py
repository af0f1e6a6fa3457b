"""What plays against what: the pairs of target and draft, and the ways to use a draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protos.pageant.v1 import inference_pb2
from scripts.bench.common.deployment import Request

if TYPE_CHECKING:  # torch, which only the maker of the pair needs
    from scripts.bench.speculation.checkpoint import MadePair

ROOT = Path(__file__).resolve().parents[3]
BUNDLED, BUNDLED_DRAFT = ROOT / "models" / "pageant-stories", ROOT / "models" / "pageant-stories-draft"
BUNDLED_HEAD = ROOT / "models" / "pageant-stories-eagle"
MODEL, NGRAM, EAGLE = KINDS = ("model", "ngram", "eagle")  # of drafts
MAX_DRAFT_TOKENS = 8
PROMPT_IDS = 16  # of a made pair's prompt

NAMES = ("Lily", "Tom", "Ben", "Mia", "Sam", "Anna", "Max", "Lucy", "Tim", "Sue")
WHO = ("girl", "boy", "dog", "cat", "bird", "bear", "rabbit", "frog", "fish", "bunny")
WHERE = ("in the park", "by the sea", "in a big house", "near a forest", "on a farm", "in a small town", "on a hill")
OPENINGS = ("Once upon a time,", "One day,", "Long ago,", "In the morning,", "In the spring,")


@dataclass(frozen=True)
class Arm:
    """One way to use a pair.  `num_draft_tokens`: None without a draft, 0 adaptive, else fixed."""

    name: str
    num_draft_tokens: int | None
    kind: str = MODEL

    def settings(self, pair: Pair) -> dict[str, Any]:
        chosen: dict[str, Any] = {"model": str(pair.target), **pair.settings}
        if self.num_draft_tokens is None:
            return chosen
        drafting = {"num_draft_tokens": self.num_draft_tokens, "max_num_draft_tokens": MAX_DRAFT_TOKENS}
        return chosen | drafting | {"draft": pair.drafts[self.kind]}

    @property
    def title(self) -> str:
        """Its name among the arms of all kinds."""
        return self.name if self.num_draft_tokens is None else f"{self.kind} {self.name}"


NONE = Arm("none", None)
ADAPTIVE = Arm("adaptive", 0)


def fixed(num_draft_tokens: int) -> Arm:
    return Arm(f"k={num_draft_tokens}", num_draft_tokens)


def arms_of(kinds: Sequence[str], lengths: Sequence[int]) -> list[Arm]:
    """One without drafts, and of each kind the fixed numbers and the adaptive one."""
    each = [*map(fixed, lengths), ADAPTIVE]
    return [NONE, *(replace(arm, kind=kind) for kind in kinds for arm in each)]


@dataclass(frozen=True)
class Pair:
    """A target, its draft and what is asked of them: `request(rng, num_tokens)` is a request like no other."""

    name: str
    target: Path
    drafts: Mapping[str, str]  # the setting `draft`, by kind
    request: Callable[[random.Random, int], Request]
    settings: dict[str, Any] = field(default_factory=dict)

    def slots(self, seed: str, num_slots: int, num_requests: int, num_tokens: int) -> list[list[Request]]:
        """What each concurrent stream asks, one after the other; a function of the arguments."""
        rng = random.Random(seed)
        return [[self.request(rng, num_tokens) for _ in range(num_requests)] for _ in range(num_slots)]


def bundled() -> Pair:
    drafts = {MODEL: str(BUNDLED_DRAFT), NGRAM: "ngram", EAGLE: f"eagle:{BUNDLED_HEAD}"}
    return Pair("bundled", BUNDLED, drafts, _story)


def made(pair: MadePair) -> Pair:
    def walk(rng: random.Random, num_tokens: int) -> Request:
        ids = [rng.randrange(pair.vocab_size) for _ in range(PROMPT_IDS)]
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids))
        return _greedy(request, num_tokens, detokenize=False)

    settings = {"max_model_len": 512, "kv_cache_memory": 256 << 20, "draft_kv_cache_memory": 64 << 20}
    return Pair("made", pair.target, {MODEL: str(pair.draft)}, walk, settings)


def _story(rng: random.Random, num_tokens: int) -> Request:
    """The beginning of a story; there are 35,000."""
    who, name, friend = rng.choice(WHO), rng.choice(NAMES), rng.choice(NAMES)
    text = f"{rng.choice(OPENINGS)} there was a {who} named {name}. {name} was {rng.choice(WHERE)} with {friend}."
    return _greedy(inference_pb2.GenerateRequest(text=text), num_tokens, detokenize=True)


def _greedy(request: Request, num_tokens: int, *, detokenize: bool) -> Request:
    """Exactly so many tokens, whatever they are."""
    greedy = inference_pb2.SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=detokenize
    )
    request.sampling.MergeFrom(greedy)
    request.stream.return_token_ids = True
    return request
