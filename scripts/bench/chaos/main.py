"""Streams of every kind under faults: every one of them must end as it does undisturbed.

scripts/chaos [--faults 60] [--seed 1] [--draft ngram] [--check]
scripts/chaos --busy 1                 beside a process that takes a core
scripts/chaos --ranks 2                with workers of two ranks each, which are killed and frozen too
scripts/chaos --stages 2               the same with pipelines of two stages
scripts/chaos --stores 2 --prefill 1   with stores and a worker for prompts, so that blocks of the KV cache move
scripts/chaos --compose --draft on     the same on containers, with networks that are cut; builds the images first
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from scripts.bench.chaos.cases import (
    Case,
    adapter_cases,
    byte_cases,
    grammar_cases,
    lengthened,
    plain_cases,
    stop_cases,
)
from scripts.bench.chaos.containers import Containers
from scripts.bench.chaos.deployment import RANK, deployed
from scripts.bench.chaos.faults import Fault, FaultStage, Inflicted, schedule
from scripts.bench.chaos.streams import (
    ReceiptTimes,
    Repetition,
    StreamOutput,
    disturbed_orphans,
    generate,
    pauses,
    until_flowing,
)
from scripts.bench.common.adapters import write_adapter
from scripts.bench.common.deployment import lasting_port
from scripts.bench.common.host import cores_taken
from scripts.bench.common.report import bench_parser
from scripts.bench.common.stack import Stack
from scripts.bench.common.tokens import MODEL
from scripts.bench.common.turns import say
from services.cli.addresses import free_port
from services.cli.display.tables import aligned
from shared.config import Settings
from shared.metrics import percentile

COUNTS = {"worker": 2, "scheduler": 1, "tokenizer": 2, "detokenizer": 2, "gateway": 2}
NUM_ORPHANS = 4
ADAPTERS = ("one", "two", "three")
METRICS_PORT = 19090
STORE_MEMORY = 256 << 20  # bytes, of each store
MOVED_WORDS = 200  # before each prompt, where blocks move


class ChaosResult(msgspec.Struct):
    """What came of one run."""

    num_clients: int
    num_streams: dict[str, int]  # by kind
    wrong: list[str]
    inflicted: list[Inflicted]
    pauses: list[float]  # parallel to `inflicted`
    undisturbed: list[float]  # the longest pause of each stream without faults
    leftovers: str  # what the deployment still held at the end, or nothing
    seconds: float
    drafts: tuple[int, int] = (0, 0)  # tokens drafted and accepted while faults happened
    num_fetched_tokens: int = 0  # prompt tokens that came as blocks
    num_handed_over: int = 0  # sequences that went on at another live worker


class ChaosOrder(msgspec.Struct, frozen=True):
    """How much of it: faults, and clients of each kind with outputs of about so many tokens."""

    num_faults: int
    seed: int
    per_kind: int = 8
    max_tokens: int = 240
    adapters: tuple[str, ...] = ()  # names of some streams' own
    num_words: int = 0  # before each prompt


class Shape(msgspec.Struct, frozen=True):
    """What the deployment is made of beside COUNTS."""

    ranks: int = 1  # of each worker
    stages: int = 1
    stores: int = 0
    prefill: int = 0  # workers for prompts, beside the others


ALONE = Shape()


async def perform(directory: Path, order: ChaosOrder, draft: str = "off", shape: Shape = ALONE) -> ChaosResult:
    """On local processes, started for this and stopped at its end."""
    for seed, name in enumerate(ADAPTERS):
        write_adapter(MODEL, directory / "adapters" / name, seed=seed, scale=0.1)
    group: dict[str, Any] = {}
    if (
        processes := shape.ranks * shape.stages
    ) > 1:  # more processes come back than there are cores, and load torch at a time
        sizes = {"tensor_parallel_size": shape.ranks, "pipeline_parallel_size": shape.stages}
        group = {**sizes, "resume_timeout": 120.0}
    if shape.stores or shape.prefill:
        group |= {"metrics_port": METRICS_PORT, "store_memory": STORE_MEMORY if shape.stores else 0}
    settings = Settings.of(
        model=str(MODEL), lora_dir=str(directory / "adapters"), max_loras=2, draft=draft,
        runtime_dir=str(directory / "run"), port=lasting_port(), http_port=-1,
        num_threads=1, num_blocks=2048, log_format="json", drain_timeout=1.0, **group,
    )  # fmt: skip
    wanted = COUNTS | {"draft": int(draft != "off"), RANK: processes - 1, "store": shape.stores}
    wanted["worker"] += shape.prefill
    counts = {service: count for service, count in wanted.items() if count}
    async with deployed(settings, counts, directory / "logs", shape.prefill) as deployment:
        own = ADAPTERS if shape.stages == 1 else ()  # a pipeline has none
        result = await act(deployment, msgspec.structs.replace(order, adapters=own))
        result.num_fetched_tokens = deployment.num_fetched_tokens
    lines = "".join(path.read_text(encoding="utf-8") for path in (directory / "logs").glob("scheduler*"))
    result.num_handed_over = lines.count('"sequence_handed_over"')
    return result


@contextmanager
def containers(directory: Path, draft: str = "off") -> Iterator[Containers]:
    """A stage of containers, built and started for this; `draft`: off, ngram, or on for the bundled model's."""
    stack = Stack(
        f"pageant-chaos-{os.getpid()}", free_port(), directory, draft="" if draft == "on" else draft,
        num_threads=1, num_blocks=2048, drain_timeout=1.0,
    )  # fmt: skip
    counts = COUNTS if draft == "off" else {**COUNTS, "draft": 2}
    try:
        stack.build()
        stack.up()
        stack.up(**counts)
        yield Containers(stack, counts)
    finally:
        stack.down()


async def act(stage: FaultStage, order: ChaosOrder) -> ChaosResult:
    """Note what every case gives undisturbed, and then what each gives while faults happen."""
    async with stage.own_channel() as channel:
        calm: list[ReceiptTimes] = []
        cases = await _cases(channel, order)
        wanted = await _together(channel, cases, calm)
        clients = [Repetition(case, outputs) for case, outputs in zip(cases, wanted, strict=True)]
        faults = schedule(order.num_faults, order.seed, stage.pairs)
        return await _disturb(stage, channel, clients, calm, faults)


async def _cases(channel: Any, order: ChaosOrder) -> list[Case]:
    per_kind, max_tokens = order.per_kind, order.max_tokens
    cases = plain_cases(per_kind, max_tokens)
    greedy = [case for case in cases if case.kind == "greedy"]
    texts = [outputs[0].text for outputs in await _together(channel, greedy, [])]
    others = [
        *byte_cases(per_kind, max_tokens, MODEL),
        *grammar_cases(per_kind, max_tokens),
        *adapter_cases(per_kind, max_tokens, order.adapters),
    ]
    if order.num_words:
        cases, others = (
            [lengthened(case, order.num_words, seed) for seed, case in enumerate(some)] for some in (cases, others)
        )
    return [*cases, *stop_cases(per_kind, max_tokens, texts), *others]


async def _together(channel: Any, cases: list[Case], calm: list[ReceiptTimes]) -> list[list[StreamOutput]]:
    calm += [ReceiptTimes() for _ in cases]
    pairs = zip(cases, calm[-len(cases) :], strict=True)
    return await asyncio.gather(*(generate(channel, case, arrivals) for case, arrivals in pairs))


async def _disturb(
    stage: FaultStage, channel: Any, clients: list[Repetition], calm: list[ReceiptTimes], faults: list[Fault]
) -> ChaosResult:
    begun, stop = time.monotonic(), asyncio.Event()
    arrivals, inflicted = [client.arrivals for client in clients], []
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run(channel, stop))
        for _ in range(NUM_ORPHANS):
            group.create_task(disturbed_orphans(stage.other_channel, clients[0].case, stop))
        await until_flowing(arrivals)
        for number, fault in enumerate(faults):
            inflicted.append(await stage.inflict(fault))
            if not fault.overlaps:
                await until_flowing(arrivals)
            await stage.count_moves()
            _progress(number + 1, len(faults), inflicted[-1], clients)
            await asyncio.sleep(fault.gap)
        await until_flowing(arrivals)
        stop.set()
    end = time.monotonic()
    return ChaosResult(
        num_clients=len(clients),
        num_streams=_by_kind(clients),
        wrong=[line for client in clients for line in client.wrong],
        inflicted=inflicted,
        pauses=pauses(inflicted, arrivals, end),
        undisturbed=[one.longest_pause(one.times[0], one.times[-1]) for one in calm],
        leftovers=await _leftovers(stage),
        seconds=end - begun,
        drafts=(sum(client.num_drafted for client in clients), sum(client.num_accepted for client in clients)),
    )


def _by_kind(clients: list[Repetition]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for client in clients:
        found[client.case.kind] += client.num_streams
    return dict(found)


async def _leftovers(stage: FaultStage) -> str:
    """What is still held once all clients have gone: nothing should be."""
    load = await stage.settled_load()
    held = [w.num_blocks - w.num_free_blocks - w.num_cached_blocks for w in load.workers]
    if load.num_running or load.num_waiting or any(held):
        return f"{load.num_running} sequences run, {load.num_waiting} wait, blocks held: {held}"
    return ""


def _progress(number: int, total: int, last: Inflicted, clients: list[Repetition]) -> None:
    num_streams, num_wrong = sum(c.num_streams for c in clients), sum(len(c.wrong) for c in clients)
    say(f"{number}/{total} {last.fault.kind} {last.fault.service}: {num_streams} streams, {num_wrong} wrong")


def table(result: ChaosResult) -> str:
    """Recovery per service, and the sums."""
    rows = []
    for service in sorted({one.fault.service for one in result.inflicted}):
        found = [p for one, p in zip(result.inflicted, result.pauses, strict=True) if one.fault.service == service]
        rows.append([service, str(len(found)), *_pauses(found)])
    rows.append(["(no fault)", "", *_pauses(result.undisturbed)])
    kinds = Counter(one.fault.kind for one in result.inflicted)
    lines = [
        "longest pause of any stream after a fault, seconds; without faults, of each stream",
        aligned(["service", "faults", "p50", "p99"], rows),
        f"faults: {sum(kinds.values())} ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})",
        f"streams: {sum(result.num_streams.values())} of {result.num_clients} clients in {result.seconds:.0f} s; "
        f"{len(result.wrong)} differences from the undisturbed run",
        f"of each kind: {', '.join(f'{count} {kind}' for kind, count in result.num_streams.items())}",
        f"left over: {result.leftovers or 'nothing'}",
        f"draft tokens: {result.drafts[0]}, accepted: {result.drafts[1]}",
        f"tokens of prompts that came as blocks: {result.num_fetched_tokens}; handed over: {result.num_handed_over}",
    ]
    return "\n".join(lines)


def _pauses(values: list[float]) -> list[str]:
    return [f"{percentile(values, q):.2f}" for q in (50, 99)]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients-per-kind", type=int, default=8, help="of ten kinds; of nine on containers")
    parser.add_argument("--max-tokens", type=int, default=240)
    parser.add_argument("--draft", default="off", help="off, ngram or a directory (on containers: on)")
    parser.add_argument("--compose", action="store_true", help="on containers")
    parser.add_argument("--ranks", type=int, default=1, help="of each worker")
    parser.add_argument("--stages", type=int, default=1, help="of each worker; one kind of clients less then, adapters")
    parser.add_argument("--stores", type=int, default=0, help="processes that keep blocks, harmed too")
    parser.add_argument("--prefill", type=int, default=0, help="workers for prompts, beside two for the rest")
    parser.add_argument("--busy", type=int, default=0, help="beside so many processes that take a core each")
    options = parser.parse_args()
    shape = Shape(options.ranks, options.stages, options.stores, options.prefill)
    words = MOVED_WORDS if shape.stores or shape.prefill else 0
    order = ChaosOrder(options.faults, options.seed, options.clients_per_kind, options.max_tokens, num_words=words)
    with cores_taken(options.busy), tempfile.TemporaryDirectory(prefix="pageant-chaos-") as directory:
        if options.compose:
            with containers(Path(directory), options.draft) as stage:
                result = asyncio.run(act(stage, order))
        else:
            result = asyncio.run(perform(Path(directory), order, options.draft, shape))
    for line in result.wrong[:20]:
        print(line)
    print(table(result))
    return int(options.check and bool(result.wrong or result.leftovers))
