"""The proof that drafts change nothing: all prompts of Spec-Bench, every token id with drafts equal to that without.

    scripts/prove_speculation [--pairs bundled,babyllama] [--prompts 480] [--tokens 64]

Real processes and gRPC.  For each pair and each kind of sampling (temperatures 0, 0.7 and 1.0, and `mixed`: truncation,
penalties, bias, log-probabilities, stop strings), first without drafts, then with: a fixed number of draft tokens, the
adaptive number, n-gram lookup, a pool so small that sequences are preempted, and the draft killed in the middle.  Each
must give the same ids; drafts must have been accepted, and the disturbance must have happened.  Exits with status 1
where any of that is not so; the table comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from protos.pageant.v1 import inference_pb2
from scripts.bench.common.deployment import Answer, Request, ServedDeployment
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.common.turns import say
from scripts.bench.speculation.arms import BUNDLED, BUNDLED_DRAFT, ROOT
from shared.tokenization import load_tokenizer

NUM_DRAFT_TOKENS = 4
BLOCK_SIZE = 16
SMALL_POOL = 1.25  # times the longest sequence
JOIN_SECONDS = 60
SMALL, KILLED = "small pool", "draft killed"
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


@dataclass(frozen=True)
class Variant:
    """A way to serve.  `expects_drafts`: whether the choice of their number is not left to measurement."""

    name: str
    settings: dict[str, Any]
    expects_drafts: bool = True

    def missing(self, counts: Counter[str]) -> list[str]:
        """What was to happen and did not."""
        found = []
        if self.expects_drafts and not counts["num_accepted_tokens"]:
            found.append("no draft accepted")
        if self.name == SMALL and not counts["num_preemptions"]:
            found.append("no preemption")
        return found


class Proof:
    """A pair and its prompts, served in several ways; `play_plain` comes first."""

    def __init__(self, name: str, target: Path, draft: Path, prompts: Prompts, num_streams: int) -> None:
        self.name = name
        self._target, self._draft = target, draft
        self._prompts = prompts
        self._num_streams = num_streams
        self._plain: dict[str, list[Answer]] = {}

    @property
    def variants(self) -> list[Variant]:
        drafting = {"draft": str(self._draft), "num_draft_tokens": NUM_DRAFT_TOKENS}
        longest = max(map(len, self._prompts.token_ids)) + self._prompts.num_tokens
        small = {"num_blocks": math.ceil(SMALL_POOL * longest / BLOCK_SIZE), "max_model_len": longest}
        return [
            Variant(f"draft, k={NUM_DRAFT_TOKENS}", drafting),
            Variant("draft, adaptive", drafting | {"num_draft_tokens": 0}, expects_drafts=False),
            Variant(f"n-gram, k={NUM_DRAFT_TOKENS}", drafting | {"draft": "ngram"}),
            Variant(SMALL, drafting | small),
            Variant(KILLED, drafting),
        ]

    def play_plain(self, loop: asyncio.Runner, kinds: list[str]) -> None:
        with ServedDeployment({"model": str(self._target)}) as deployment:
            for kind in kinds:
                played = loop.run(deployment.play(self._slots(kind)))
                self._plain[kind] = played.answers
                say(f"  {self.name}, without drafts, {kind}: {played.num_tokens} tokens in {played.seconds:.1f} s")

    def play(self, loop: asyncio.Runner, variant: Variant, kinds: list[str]) -> list[Result]:
        with ServedDeployment({"model": str(self._target), **variant.settings}) as deployment:
            if variant.expects_drafts:
                self._until_drafting(loop, deployment)
            return [self._compare(loop, deployment, variant, kind) for kind in kinds]

    def _compare(self, loop: asyncio.Runner, deployment: ServedDeployment, variant: Variant, kind: str) -> Result:
        before, killed = deployment.counts(), list[int]()
        answers_left = len(self._prompts.token_ids) // 3  # until the draft is killed; the supervisor starts another

        def ended() -> None:
            nonlocal answers_left
            answers_left -= 1
            if answers_left == 0 and variant.name == KILLED:
                killed.extend(deployment.pids("draft"))
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)

        played = loop.run(deployment.play(self._slots(kind), ended))
        counts = deployment.counts() - before
        missing = variant.missing(counts)
        if variant.name == KILLED and not (killed and self._until_drafting(loop, deployment)):
            missing.append("the draft did not come back")
        pairs = zip(played.answers, self._plain[kind], strict=True)
        return compared(
            f"{self.name}, {variant.name}, {kind}",
            sum(answer.token_ids != plain.token_ids for answer, plain in pairs),
            f"{played.num_tokens} tokens of {len(played.answers)} prompts in {played.seconds:.1f} s",
            counts,
            missing,
        )

    def _slots(self, kind: str) -> list[list[Request]]:
        requests = self._prompts.requests(kind)
        return [requests[place :: self._num_streams] for place in range(self._num_streams)]

    def _until_drafting(self, loop: asyncio.Runner, deployment: ServedDeployment) -> bool:
        """Ask until a draft was verified: then the draft has joined.  False where that does not happen."""
        deadline, begun = time.monotonic() + JOIN_SECONDS, deployment.counts()["num_drafts"]
        while time.monotonic() < deadline:
            loop.run(deployment.play(self._slots("T=0")[:1]))
            if deployment.counts()["num_drafts"] > begun:
                return True
        return False


def compared(what: str, num_differing: int, played: str, counts: Counter[str], missing: list[str]) -> Result:
    """Missed where prompts differ, or where something that was to happen is missing."""
    drafted, accepted = counts["num_draft_tokens"], counts["num_accepted_tokens"]
    share = f", {accepted / drafted:.3f} accepted" if drafted else ""
    note = f"{played}; {drafted} drafted{share}, {counts['num_preemptions']} preempted"
    line = Result(
        f"{what}: prompts that differ",
        None if missing else num_differing,
        at_most=0,
        note="; ".join([*missing, note]),
    )
    say(f"  {line.what}: {num_differing}; {line.note}")
    return line


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through every `finally`
    known = {
        "bundled": (BUNDLED, BUNDLED_DRAFT),
        "babyllama": (args.data / "models" / "babyllama-361", args.data / "models" / "babyllama-361-draft"),
    }
    lines: list[Result] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        for name in args.pairs:
            target, draft = known[name]
            prompts = spec_bench(args.data, target, num_tokens=args.tokens, num_prompts=args.prompts)
            proof = Proof(name, target, draft, prompts, args.streams)
            proof.play_plain(loop, args.kinds)
            for variant in proof.variants:
                if not args.variants or any(word in variant.name for word in args.variants):
                    lines += proof.play(loop, variant, args.kinds)
    return finish(lines, check=True, title=f"{len(lines)} comparisons of token ids") or int(not lines)


def arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__, has_check=False)
    parser.add_argument("--data", type=Path, default=data_directory(), help="the shared test data")
    parser.add_argument("--pairs", type=words, default=["bundled", "babyllama"])
    parser.add_argument("--kinds", type=words, default=list(KINDS), help=f"of sampling: {','.join(KINDS)}")
    parser.add_argument("--variants", type=words, default=[], help="only those whose name has one of these words in it")
    parser.add_argument("--prompts", type=int, help="only so many")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--streams", type=int, default=32, help="concurrent")
    args = parser.parse_args()
    if not args.data.is_dir():
        parser.error(f"no test data at {args.data}: give --data DIR")
    return args


def words(text: str) -> list[str]:
    return text.split(",")
