"""What a store is worth: the time to the first token of a long prompt that a killed worker had computed.

    scripts/bench_moves [--check] [--rounds 3] [--models DIR] [--tokens 2048] [--dtype auto]
    scripts/bench_moves --between-workers [--types float32,bfloat16,int8] [--check]   scripts/bench/blocks/handovers.py

Each round has a prompt of its own.  It is computed first, and stored meanwhile; then the worker is killed (SIGKILL),
and its successor, once it serves, is asked the same: what the store has is fetched, the rest computed.  Both times end
with the first token at the client, and the two are compared as a ratio, in one run.  Before either, other prompts have
filled the worker's whole pool: the kernel gives memory page by page when it is first written, which on some machines
takes longer than what is measured here, and happens once in a worker's life.  The share that was fetched is that
of the prompt's cached tokens, which a worker without a past can only have from the store.

Rounds of a second kind kill the store too: its next life has the blocks on a disk, of which the kernel has nothing in
memory any more.  In those of a third the store stands still (SIGSTOP) when the prompt is asked again, which has to be
computed after all.  Then other streams beside prompts that come from the store (scripts/bench/blocks/others.py).  Last,
the data link alone: through memory beside a copy, over TCP beside a bare socket.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2_grpc
from scripts.bench.blocks import data_link, handovers, others
from scripts.bench.common.clients import ask_of
from scripts.bench.common.deployment import ServedDeployment
from scripts.bench.common.models import kept
from scripts.bench.common.proc import processor
from scripts.bench.common.report import Result, bench_parser, finish

SOONER, FROM_DISK, SLOWER, SHARE = 10.0, 3.0, 1.05, 0.9  # targets
KINDS = ("memory", "disk", "frozen")
STORED_SECONDS = 2.0  # that the last blocks have to be stored
SERVE_SECONDS, REQUEST_SECONDS = 180.0, 240.0
FILLS = 3  # prompts that a pool has room for, and that fill it before anything is measured
VOCAB = 8000  # that the made tokenizer has


def first_token(address: str, token_ids: list[int]) -> tuple[float, int, int]:
    """Seconds to the first token, the token, and how many of the prompt were cached.  Raises grpc.RpcError."""
    request = ask_of(token_ids, max_tokens=1, temperature=0.0, ignore_eos=True)
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(SERVE_SECONDS)
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        begin = time.perf_counter()
        (message,) = stub.Generate(request, timeout=REQUEST_SECONDS)
        seconds = time.perf_counter() - begin
    return seconds, message.token_ids[0], message.usage.cached_tokens


def replace_worker(deployment: ServedDeployment) -> None:
    (worker,) = deployment.pids("worker")
    os.kill(worker, signal.SIGKILL)
    first_token(deployment.address, [4, 5, 6])  # which the successor computes


def replace_store(deployment: ServedDeployment, disk: Path) -> None:
    """Have another life of the store find its blocks on a disk, of which the kernel has nothing in memory."""
    (store,) = deployment.pids("store")
    os.kill(store, signal.SIGKILL)
    for path in disk.glob("*/*.blocks"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    deadline = time.monotonic() + SERVE_SECONDS
    while store in (lives := deployment.pids("store")) or not lives:
        if time.monotonic() > deadline:
            raise RuntimeError("no store comes in place of the one that was killed")
        time.sleep(0.1)
    time.sleep(STORED_SECONDS)  # until it has told what it has


def frozen(deployment: ServedDeployment, token_ids: list[int]) -> tuple[float, int, int]:
    """The first token while the store stands still."""
    (store,) = deployment.pids("store")
    os.kill(store, signal.SIGSTOP)
    try:
        return first_token(deployment.address, token_ids)
    finally:
        os.kill(store, signal.SIGCONT)


def measure(
    deployment: ServedDeployment, random_ids: random.Random, num_tokens: int, disk: Path, kind: str
) -> dict[str, float]:
    """One round of a kind (memory, disk, frozen): seconds computed and fetched, and the share that was fetched."""
    prompt, *fills = (random_ids.choices(range(4, VOCAB), k=num_tokens + 1) for _ in range(1 + 2 * FILLS))
    for fill in fills[:FILLS]:
        first_token(deployment.address, fill)
    computed, token, _ = first_token(deployment.address, prompt)
    time.sleep(STORED_SECONDS)
    if kind == "disk":
        replace_store(deployment, disk)
    replace_worker(deployment)
    for fill in fills[FILLS:]:
        first_token(deployment.address, fill)
    ask = partial(frozen, deployment) if kind == "frozen" else partial(first_token, deployment.address)
    fetched, again, cached = ask(prompt)
    if again != token:
        raise RuntimeError(f"a prompt that was fetched goes on with {again}, one that was computed with {token}")
    least, _, _ = first_token(deployment.address, random_ids.choices(range(4, VOCAB), k=2))
    return {"computed": computed, "fetched": fetched, "least": least, "share": cached / num_tokens}


def report(found: dict[str, list[dict[str, float]]], num_tokens: int) -> list[Result]:
    rounds = found["memory"]
    middle = {figure: median(one[figure] for one in rounds) for figure in rounds[0]}
    ratio, disk, slow = (median(one["computed"] / one["fetched"] for one in found[kind]) for kind in KINDS)
    return [
        Result(f"{num_tokens} tokens computed, to the first token", 1000 * middle["computed"], "ms"),
        Result(f"{num_tokens} tokens fetched, to the first token", 1000 * middle["fetched"], "ms"),
        Result("2 tokens computed, to the first token", 1000 * middle["least"], "ms", note="in both of these"),
        Result("sooner from the store's memory", ratio, "x", at_least=SOONER),
        Result("sooner if fetching took no time at all", middle["computed"] / middle["least"], "x"),
        Result(
            f"{num_tokens} tokens computed beside a store that writes to its disk",
            1000 * median(one["computed"] for one in found["disk"]),
            "ms",
        ),
        Result("sooner from the store's disk", disk, "x", at_least=FROM_DISK),
        Result("a store that stands still, of computing", 1 / slow, "x", at_most=SLOWER),
        Result("worker killed: fetched of the stored tokens", 100 * middle["share"], "%", at_least=100 * SHARE),
    ]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt, without the last one")
    parser.add_argument("--dtype", default="auto", help="of the arithmetic, as the setting")
    parser.add_argument("--models", type=Path, help="where model S is, or is made and kept; default: made for this run")
    parser.add_argument("--between-workers", action="store_true", help="what workers have from each other, instead")
    parser.add_argument("--types", default=",".join(handovers.TYPES), help="of the arithmetic, between workers")
    args = parser.parse_args()
    random_ids = random.Random(7)
    with kept(args.models, "S") as model, tempfile.TemporaryDirectory() as blocks:
        if args.between_workers:
            types = {name: handovers.TYPES[name] for name in args.types.split(",") if name}
            rows = [row for name, settings in types.items() for row in handovers.measure(name, settings)]
            rows += handovers.measure_pauses(model, args.rounds)
            return finish(rows, check=args.check, title=f"what passes between workers; {processor()}")
        settings: dict[str, Any] = {"model": str(model), "dtype": args.dtype, "draft": "off", "store_memory": 4 << 30}
        settings |= {
            "verify_fetches": 0,
            "max_model_len": args.tokens + 64,
            "num_blocks": FILLS * (args.tokens // 16 + 4),
        }
        found: dict[str, list[dict[str, float]]] = {}
        for kind in KINDS:
            on_disk = {"store_disk": blocks, "store_disk_size": 4 << 30} if kind == "disk" else {}
            with ServedDeployment(settings | on_disk) as deployment:
                found[kind] = [
                    measure(deployment, random_ids, args.tokens, Path(blocks), kind) for _ in range(args.rounds)
                ]
        rows = [*report(found, args.tokens), *others.measure(model, args.dtype, seed=11), *data_link.measure()]
    return finish(rows, check=args.check, title=f"what a store is worth; {processor()}")
