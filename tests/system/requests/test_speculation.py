"""Drafts through real processes: they change no token, whatever happens to them, and are seen to have worked.

On the bundled pair, with some of Spec-Bench's prompts: PAGEANT_TEST_PROMPTS says how many of them, of 480.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.common.proc import cpu_seconds
from shared.text.tokenization import load_tokenizer
from tests.system.harness import MODEL, ROOT, Answer, Troupe, ask, collect, troupe

DRAFT = ROOT / "models" / "pageant-stories-draft"
FEW_PROMPTS = 8
NUM_PROMPTS = int(os.environ.get("PAGEANT_TEST_PROMPTS", FEW_PROMPTS))
NUM_TOKENS = 40
JOIN_SECONDS = 30
THREADS = ("--num-threads", "1")
FEW = ("--max-num-seqs", "8")  # at a time, so that a draft on a busy machine is not too late for all of them
DRAFTING = ("--draft", str(DRAFT), "--num-draft-tokens", "4", *FEW, *THREADS)
LOOKUP = ("--draft", "ngram", "--num-draft-tokens", "4", *FEW, *THREADS)
HEAD = ("--draft", f"eagle:{ROOT / 'models' / 'pageant-stories-eagle'}", "--num-draft-tokens", "4", *THREADS)
SMALL_POOL = ("--num-blocks", "80", "--max-num-batched-tokens", "256")

CROWD = "crowd"

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

Tokens = list[list[int]]


@dataclass(frozen=True)
class Prompts:
    """Token ids of every prompt, short enough for the model and what it is to generate."""

    token_ids: list[list[int]]

    def requests(self, kind: str) -> list[Any]:
        """The same for the same kind: the seed of each is its number."""
        chosen = [MIXTURE[n % len(MIXTURE)] if kind == MIXED else {"temperature": TEMPERATURES[kind]}
                  for n in range(len(self.token_ids))]  # fmt: skip
        return [
            ask(token_ids=ids, seed=number, max_tokens=NUM_TOKENS, **sampling)
            for number, (ids, sampling) in enumerate(zip(self.token_ids, chosen, strict=True))
        ]


@pytest.fixture(scope="module")
def prompts(data_dir: Path) -> Prompts:
    """The first turns of Spec-Bench in the model's ids: the end of each, as much as fits."""
    tokenizer = load_tokenizer(MODEL)
    room = tokenizer.context_length - NUM_TOKENS
    lines = (data_dir / "prompts" / "spec-bench.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 480
    texts = [json.loads(line)["turns"][0] for line in lines[:: len(lines) // NUM_PROMPTS]]
    return Prompts([tokenizer.encode(text)[-room:] for text in texts])


@pytest.fixture(scope="module")
def plain(prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokens]:
    """What each kind of sampling gives without drafts, and what a crowd gets."""
    with troupe(tmp_path_factory.mktemp("plain"), *THREADS) as started:
        given = {kind: tokens(started.generate(prompts.requests(kind))) for kind in KINDS}
        return given | {CROWD: tokens(started.generate(crowd()))}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    with troupe(tmp_path_factory.mktemp("drafting"), *DRAFTING) as started:
        until_drafting(started)
        yield started


def crowd() -> list[Any]:
    """Two turns of eight that are let in with two blocks each and grow to fourteen: no small pool holds them."""
    sampled: Any = {"max_tokens": 200, "temperature": 1.0, "ignore_eos": True}
    return [ask(token_ids=[5, 90, 7, 300] * 6, seed=seed, **sampled) for seed in range(16)]


def tokens(answers: list[list[Answer]]) -> Tokens:
    return [answer.token_ids for request in answers for answer in request]


def until_drafting(running: Troupe) -> None:
    """Ask until a draft was verified: then the draft has joined.  The prompt repeats itself, and so does its answer."""
    request = ask(token_ids=[5, 90, 7, 300] * 6, max_tokens=60, temperature=0.0, ignore_eos=True)
    deadline, begun = time.monotonic() + JOIN_SECONDS, running.load().num_drafts
    while running.load().num_drafts == begun:
        assert time.monotonic() < deadline, "no draft has joined"
        running.generate([request])


def check(running: Troupe, prompts: Prompts, plain: dict[str, Tokens], *, accepting: Sequence[str] = KINDS) -> Any:
    """Every kind gives its plain tokens, those of `accepting` with drafts accepted; returns the load at the end."""
    for kind in KINDS:
        before = running.settled_load()
        answers = running.generate(prompts.requests(kind))
        load = running.settled_load()
        assert tokens(answers) == plain[kind], kind
        num_accepted = load.num_accepted_tokens - before.num_accepted_tokens
        flat = [answer for request in answers for answer in request]
        told = sum(answer.num_accepted_tokens for answer in flat)
        assert told <= num_accepted, "the clients are told what the scheduler counts"
        assert told > 0 or kind not in accepting, kind
        assert all(answer.num_accepted_tokens <= answer.num_draft_tokens for answer in flat)
        print(f"{kind}: {num_accepted} of {load.num_draft_tokens - before.num_draft_tokens} draft tokens accepted, "
              f"late {load.num_late_drafts - before.num_late_drafts}")  # fmt: skip
    return running.settled_load()


def test_a_model_draft_changes_no_token(drafting: Troupe, prompts: Prompts, plain: dict[str, Tokens]) -> None:
    load = check(drafting, prompts, plain)
    positions = list(load.num_accepted_tokens_per_position)
    assert sum(positions) == load.num_accepted_tokens and len(positions) <= 4
    assert positions == sorted(positions, reverse=True), "a token is accepted only after those before it"


def test_prompt_lookup_changes_no_token(tmp_path: Path, prompts: Prompts, plain: dict[str, Tokens]) -> None:
    with troupe(tmp_path, *LOOKUP) as started:
        until_drafting(started)
        check(started, prompts, plain, accepting=("T=0",))  # what is sampled seldom repeats the prompt


def test_preempted_sequences_keep_their_tokens(tmp_path: Path, prompts: Prompts, plain: dict[str, Tokens]) -> None:
    with troupe(tmp_path, *DRAFTING, *SMALL_POOL) as started:
        until_drafting(started)
        check(started, prompts, plain)
        assert tokens(started.generate(crowd())) == plain[CROWD]
        load = started.settled_load()
    assert load.num_preemptions > 0
    (worker,) = load.workers
    assert worker.num_free_blocks + worker.num_cached_blocks == worker.num_blocks == 80


def test_an_adaptive_number_changes_no_token(tmp_path: Path, prompts: Prompts, plain: dict[str, Tokens]) -> None:
    with troupe(tmp_path, "--draft", str(DRAFT), *THREADS) as started:
        for kind in KINDS:
            assert tokens(started.generate(prompts.requests(kind))) == plain[kind], kind


def test_rejection_sampling_is_the_same_where_nothing_is_drawn(
    tmp_path: Path, prompts: Prompts, plain: dict[str, Tokens]
) -> None:
    with troupe(tmp_path, *DRAFTING, "--acceptance", "rejection") as started:
        until_drafting(started)
        assert tokens(started.generate(prompts.requests("T=0"))) == plain["T=0"]
        before, deadline = started.settled_load().num_accepted_tokens, time.monotonic() + JOIN_SECONDS
        while started.settled_load().num_accepted_tokens == before:  # on a busy machine drafts may all be late
            assert time.monotonic() < deadline, "no draft was accepted"
            assert all(tokens(started.generate(prompts.requests("T=1.0"))))


def test_a_request_can_do_without(drafting: Troupe) -> None:
    kinds: list[dict[str, Any]] = [{"speculate": False}, {"speculate": True}, {}]
    answers = drafting.generate([ask("One day", max_tokens=60, temperature=0.0, ignore_eos=True, **k) for k in kinds])
    ((without,), (asked,), (default,)) = answers
    assert without.token_ids == asked.token_ids == default.token_ids
    assert without.num_draft_tokens == 0
    assert asked.num_accepted_tokens > 0 and default.num_accepted_tokens > 0


def long_requests() -> list[Any]:
    return [ask("One day", seed=index, max_tokens=300, ignore_eos=True, temperature=1.0) for index in range(6)]


def test_a_killed_draft_costs_no_token_and_comes_back(drafting: Troupe) -> None:
    wanted = tokens(drafting.generate(long_requests()))
    killed = drafting.pids("draft")
    answers = asyncio.run(drafting.disturb(long_requests(), "draft"))
    assert tokens(answers) == wanted
    until_drafting(drafting)
    assert drafting.pids("draft") != killed
    assert tokens(drafting.generate(long_requests())) == wanted


def test_a_stopped_draft_holds_nobody_up(drafting: Troupe) -> None:
    wanted = tokens(drafting.generate(long_requests()))
    (stopped,) = drafting.pids("draft")
    try:
        answers = asyncio.run(drafting.disturb(long_requests(), "draft", signal.SIGSTOP))
        assert tokens(answers) == wanted
        assert tokens(drafting.generate(long_requests())) == wanted, "and those that come later are not held up either"
    finally:
        os.kill(stopped, signal.SIGCONT)
    until_drafting(drafting)
    assert drafting.pids("draft") == [stopped], "it rejoined by itself"
    assert tokens(drafting.generate(long_requests())) == wanted


def test_two_drafts_share_the_work(tmp_path: Path, prompts: Prompts, plain: dict[str, Tokens]) -> None:
    with troupe(tmp_path, *DRAFTING, "--drafts", "2") as started:
        until_drafting(started)
        pids = started.pids("draft")
        assert len(pids) == 2
        before = [cpu_seconds(pid) for pid in pids]
        check(started, prompts, plain)
        assert all(cpu_seconds(pid) > taken + 0.05 for pid, taken in zip(pids, before, strict=True)), "both worked"
        os.kill(pids[0], signal.SIGKILL)
        assert tokens(started.generate(prompts.requests("T=1.0"))) == plain["T=1.0"]


# -- a head of the worker's own, in a pool that is too small


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    with troupe(tmp_path_factory.mktemp("head"), *HEAD, *SMALL_POOL) as started:
        yield started


def test_drafts_of_a_head_change_no_token(with_head: Troupe, prompts: Prompts, plain: dict[str, Tokens]) -> None:
    check(with_head, prompts, plain)
    assert tokens(with_head.generate(crowd())) == plain[CROWD]
    assert with_head.settled_load().num_preemptions > 0


@pytest.mark.timeout(300 if NUM_PROMPTS <= FEW_PROMPTS else 1200)  # a quarter of an hour for all prompts of all kinds
@pytest.mark.parametrize(("service", "kind"), [("scheduler", "T=0.7"), ("worker", MIXED)])
def test_killed_processes_cost_a_head_no_token(
    service: str, kind: str, with_head: Troupe, prompts: Prompts, plain: dict[str, Tokens]
) -> None:
    """The next scheduler learns anew what drafts are worth; the next worker's head computes its keys anew."""
    killed = with_head.pids(service)
    for one in KINDS if NUM_PROMPTS > FEW_PROMPTS else (kind,):
        answers = asyncio.run(killing(with_head, prompts.requests(one), service))
        assert tokens(answers) == plain[one], one
        assert sum(answer.num_accepted_tokens for (answer,) in answers) > 0
    assert with_head.pids(service) != killed


async def killing(running: Troupe, requests: list[Any], service: str) -> list[list[Answer]]:
    """All requests at once; the service is killed when the first of them streams, and when half of them are over."""
    async with running.channel() as channel:
        begun = asyncio.Event()
        tasks = [asyncio.create_task(collect(channel, request, begun=begun)) for request in requests]
        await begun.wait()
        running.kill(service)
        for number, done in enumerate(asyncio.as_completed(tasks), 1):
            await done
            if number == len(tasks) // 2:
                running.kill(service)
        return [task.result() for task in tasks]
