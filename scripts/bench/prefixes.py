"""How many more prompt tokens would be found cached if reuse went on behind the last full block, to the token.

    scripts/bench_prefixes DATA [--block-sizes 16,32,64]

DATA has `prompts/mt-bench.jsonl`, `prompts/gsm8k-test.jsonl`, `tokenizers/qwen3`, `text/tinystories-cased.txt` and
`traces/mooncake-conversation.jsonl`.  The cache is taken for endless, so these are the most that reuse can find.

Three loads are of tokens: chats in turns, of which some are asked again with an edited end; problems behind five solved
ones; and the same questions without anything before them.  They go through the scheduler's core, one request after the
other, with a stand-in for the worker that samples their answers: with and without `enable_partial_block_hits`, and what
a request costs the core in either.

The trace of Mooncake says only which of its blocks of 512 tokens are equal: what lies behind the last equal one is not
known, so the gain is given as its bound, a block less a token for each request, and as its mean where ends of prefixes
are spread evenly, half of that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

from tokenizers import Tokenizer

from scripts.bench.common.core import WORKER, asked, core_of, forget_news
from scripts.bench.common.report import bench_parser
from services.scheduler.state.policy import Policy
from shared.messages import StepResult, WorkerCapacity

SYSTEM = "You are a helpful assistant. Answer in a friendly way, and say so where you do not know something."
NUM_SHOTS = 5
ANSWER_TOKENS = (60, 400)
AGAIN = 0.25  # of the chats: the last message is edited and sent again
POOL_TOKENS = 1 << 20  # that the worker's pool has room for: nothing is evicted
TRACE_BLOCK = 512  # tokens of one of Mooncake's hash ids

Load = list[tuple[list[int], list[int]]]  # prompts, each with its answer


def serve(load: Load, block_size: int, *, partial: bool) -> tuple[float, float]:
    """Per request: tokens that the scheduler's core finds cached, and milliseconds of the core's processor time."""
    capacity = WorkerCapacity(POOL_TOKENS // block_size, block_size, 1, 1 << 14, 1 << 18, "m", "", "")
    core = core_of(capacity, Policy(max_num_batched_tokens=1 << 14, enable_partial_block_hits=partial))
    start = process_time()
    for number, (prompt, answer) in enumerate(load):
        core.add(asked(str(number), prompt, max_tokens=max(1, len(answer))), 0.0)
        tokens = iter(answer or [0])
        while plan := core.schedule(WORKER):
            core.apply(WORKER, StepResult(plan.epoch, plan.step_id, [1], [next(tokens)]))
        forget_news(core)
    return core.counters.num_prefix_cache_hits / len(load), 1000 * (process_time() - start) / len(load)


# -- loads


def turns(*messages: str) -> str:
    """In the form of Qwen's chats; the first message is the system's, then user and assistant take turns."""
    roles = ("system", *("user", "assistant") * len(messages))
    said = (f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, messages, strict=False))
    return "".join(said) + "<|im_start|>assistant\n"


def chats(data: Path, encode: Any, chance: random.Random) -> Load:
    """Two turns of each question, in the order in which many clients send them."""
    story = encode((data / "text/tinystories-cased.txt").read_text(encoding="utf-8")[:400_000])
    load: list[tuple[float, list[int], list[int]]] = []
    for line in (data / "prompts/mt-bench.jsonl").read_text(encoding="utf-8").splitlines():
        first, second = json.loads(line)["turns"][:2]
        at, start = chance.random(), chance.randrange(len(story) - 1000)
        answer = story[start : start + chance.randrange(*ANSWER_TOKENS)]
        asked = encode(turns(SYSTEM, first))
        load.append((at, asked, answer))
        later = [*asked, *answer, *encode(f"<|im_end|>\n<|im_start|>user\n{second}<|im_end|>\n<|im_start|>assistant\n")]
        load.append((at + 0.1, later, story[start + 500 : start + 700]))
        if chance.random() < AGAIN:
            words = second.split()
            edited = " ".join([*words[: len(words) // 2], "please", *words[len(words) // 2 :]])
            tail = encode(f"<|im_end|>\n<|im_start|>user\n{edited}<|im_end|>\n<|im_start|>assistant\n")
            load.append((at + 0.2, [*asked, *answer, *tail], story[start + 700 : start + 900]))
    return [(prompt, answer) for _, prompt, answer in sorted(load)]


def problems(data: Path, encode: Any) -> Iterator[tuple[list[int], list[int]]]:
    lines = [json.loads(line) for line in (data / "prompts/gsm8k-test.jsonl").read_text(encoding="utf-8").splitlines()]
    shots = "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in lines[:NUM_SHOTS])
    for one in lines[NUM_SHOTS:505]:
        yield encode(f"{shots}Question: {one['question']}\nAnswer:"), encode(one["answer"])


def bare(data: Path, encode: Any) -> Iterator[tuple[list[int], list[int]]]:
    for line in (data / "prompts/mt-bench.jsonl").read_text(encoding="utf-8").splitlines():
        yield encode(turns(SYSTEM, json.loads(line)["turns"][0])), []


def mooncake(data: Path) -> tuple[int, float, float]:
    """Requests, their mean tokens, and the mean tokens of their longest prefix of equal blocks."""
    known: set[int] = set()
    num_requests, num_tokens, num_found = 0, 0, 0
    for line in (data / "traces/mooncake-conversation.jsonl").read_text(encoding="utf-8").splitlines():
        request = json.loads(line)
        names = request["hash_ids"]
        count = next((place for place, name in enumerate(names) if name not in known), len(names))
        num_found += min(count * TRACE_BLOCK, request["input_length"] - 1)
        num_tokens += request["input_length"]
        num_requests += 1
        known.update(names)
    return num_requests, num_tokens / num_requests, num_found / num_requests


def main() -> int:
    parser = bench_parser(__doc__, has_check=False)
    parser.add_argument("data", type=Path)
    parser.add_argument("--block-sizes", default="16,32,64")
    args = parser.parse_args()
    sizes = [int(size) for size in args.block_sizes.split(",")]
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizers/qwen3/tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    loads = {
        "chats in turns": chats(args.data, encode, random.Random(5)),
        "problems behind five others": list(problems(args.data, encode)),
        "questions behind a system prompt": list(bare(args.data, encode)),
    }
    for name, load in loads.items():
        tokens = sum(len(prompt) for prompt, _ in load) / len(load)
        print(f"{name}: {len(load)} requests of {tokens:.0f} tokens")
        for size in sizes:
            (whole, plain), (parts, dear) = (serve(load, size, partial=partial) for partial in (False, True))
            more = f"to the token {parts - whole:4.1f} more, {(parts - whole) / (tokens - whole):.2%} of the rest"
            print(f"  blocks of {size:2}: {whole:7.1f} found; {more}; {plain:.2f} ms in the core, {dear:.2f} ms")
    count, tokens, least = mooncake(args.data)
    print(f"Mooncake: {count} requests of {tokens:.0f} tokens, at least {least:.0f} found")
    for size in sizes:
        most, rest = size - 1, tokens - least
        more = f"to the token {most / 2} more, {most / 2 / rest:.2%} of the rest"
        print(f"  blocks of {size:2}: {more}; at most {most / rest:.2%}")
    return 0
