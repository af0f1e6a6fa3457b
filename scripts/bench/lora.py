"""What adapters cost: decoding of 32 streams over 1, 8 and 32 of them beside the base model, in turns within one run.

    scripts/bench_lora [--check] [--model S] [--rank 16] [--rounds 5] [--tokens 48] [--threads 0] [--dtype auto]
                       [--peers DIR]

A random model as `bench_peers` makes it, and random adapters of all its linears, in bfloat16.  The scheduler's core and
a worker's runner take turns in one process, as in a deployment without its wires.  A figure is the median over the
rounds of the ratio within a round, since other work on the machine changes more slowly than that.

Then adapters are loaded beside streams of the base, by another thread, as in a worker: how long it takes from the order
to the first step that computes with an adapter, and what becomes of the time between the others' tokens, beside rounds
in which requests of the base come instead.

`--peers`: a folder in which vLLM's CPU build is installed as `bench_peers` wants it.  It is given the same adapters,
and each of the two in turn so many streams over so many of them, prompts included.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import structlog
import torch

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from scripts.bench.common.adapters import write_adapter
from scripts.bench.common.core import asked, core_of, steps
from scripts.bench.common.models import ensure
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.peers.catalog import FULL, engines
from scripts.bench.peers.child import EngineProcess
from services.scheduler.state.policy import Policy
from services.worker.adapters import NICENESS, AdapterLoading
from shared.config import Settings
from shared.messages import Adapter, AdaptersHeld, LoadAdapter, UnloadAdapter
from shared.metrics import percentile
from shared.processes.idle_time import give_way

STREAMS, PROMPT = 32, 16
TARGETS = {1: 0.90, 8: 0.85, 32: 0.80}  # of the base's tokens per second, by adapters
LOAD_TARGET = 100.0  # milliseconds, from the order to the first step
NUM_LOADS = 16  # of a round
PAUSE_TARGET = 1.1  # of the time between tokens, p99
PEER_TARGET = 1.3  # of vLLM's tokens per second
PEER_TOKENS, PEER_ROUNDS, PEER_SECONDS = 8, 1, 600.0


@dataclass(slots=True)
class Comings:
    """Seconds."""

    pauses: list[float] = field(default_factory=list)  # between the tokens of streams that were there all the time
    first_steps: list[float] = field(default_factory=list)  # from an order, or a request, to its first step


class Deployment:
    """A scheduler's core and one worker's runner."""

    def __init__(self, settings: Settings) -> None:
        self.runner: ModelRunner = load_runner(settings)
        assert self.runner.adapters is not None
        self._adapters = self.runner.adapters
        self.core = core_of(self.runner.capacity, Policy(enable_prefix_caching=False))
        self._num_asked = 0

    def load(self, name: str, path: Path) -> tuple[Adapter, float]:
        """The adapter, and the seconds that its loading took."""
        self.core.adapters.load(LoadAdapter(name, "g", name, str(path)))
        loading = AdapterLoading(self._adapters)
        begin = time.perf_counter()
        for _, order in self.core.adapters.take_orders():
            loading.apply(order)
            for answer in loading.turn():
                self.core.adapters.held(answer)
        seconds = time.perf_counter() - begin
        ((_, loaded),) = self.core.adapters.take_answers()
        return loaded.adapter, seconds

    def unload(self) -> None:
        """All of them."""
        for name in list(self.core.adapters.known):
            self.core.adapters.unload(UnloadAdapter(name, "g", name))
        loading = AdapterLoading(self._adapters)
        for _, order in self.core.adapters.take_orders():
            loading.apply(order)
            self.core.adapters.held(loading.turn()[0])
        self.core.adapters.take_answers()

    def come_and_go(self, paths: Sequence[Path | None], num_steps: int) -> Comings:
        """Beside streams of the base, one request after another of each of these adapters, which are loaded for it;
        None: of the base."""
        loading, found, left = AdapterLoading(self._adapters), Comings(), deque(paths)
        for place in range(STREAMS - 1):
            self._ask(place, None, num_steps)
        awaited, begun, before = "", 0.0, 0.0
        reading: Future[list[AdaptersHeld]] | None = None
        with ThreadPoolExecutor(1, initializer=give_way, initargs=(NICENESS,)) as thread:
            for plan, _, _, launched, _ in steps(self.core, self.runner):
                if awaited and plan.admitted:
                    awaited = ""
                    found.first_steps.append(launched - begun)
                now = time.perf_counter()
                if before:
                    found.pauses.append(now - before)
                before = now if max(plan.num_scheduled_tokens) <= PROMPT and len(plan.rows) >= STREAMS - 1 else 0.0
                if reading is not None and reading.done():
                    self.core.adapters.held(reading.result()[0])
                    ((_, loaded),) = self.core.adapters.take_answers()
                    awaited, reading = self._ask(STREAMS, loaded.adapter, 4), None
                elif reading is None and not awaited and left and len(plan.rows) == STREAMS - 1:
                    path, begun = left.popleft(), time.perf_counter()
                    if path is None:
                        awaited = self._ask(STREAMS, None, 4)
                        continue
                    self.core.adapters.load(LoadAdapter(path.name, "g", path.name, str(path)))
                    ((_, order),) = self.core.adapters.take_orders()
                    loading.apply(order)
                    reading = thread.submit(loading.turn)
        assert not left, "the streams ended before all adapters had come"
        return found

    def _ask(self, place: int, adapter: Adapter | None, num_tokens: int) -> str:
        self._num_asked += 1
        prompt = [3 + (7 * place + index) % 1000 for index in range(PROMPT)]
        self.core.add(asked(f"r{self._num_asked}", prompt, adapter=adapter, max_tokens=num_tokens), now=0.0)
        return f"r{self._num_asked}"

    def decode(self, adapters: Sequence[Adapter | None], num_tokens: int, *, with_prompts: bool = False) -> float:
        """Tokens per second of as many streams, once all prompts are computed, or from the beginning."""
        begin, count = time.perf_counter() if with_prompts else 0.0, 0
        for place, adapter in enumerate(adapters):
            self._ask(place, adapter, num_tokens)
        for plan, result, *_ in steps(self.core, self.runner):
            if begin:
                count += len(result.sampled_token_ids)
            elif max(plan.num_scheduled_tokens) == 1:
                begin = time.perf_counter()
        return count / (time.perf_counter() - begin)


def measure(deployment: Deployment, adapters: Sequence[Adapter], num_rounds: int, num_tokens: int) -> list[Result]:
    """The round before the first warms up; rounds go through the numbers of adapters forwards, then backwards."""
    rates: dict[int, list[float]] = {0: [], **{count: [] for count in TARGETS}}
    for number in range(num_rounds + 1):
        for count in sorted(rates, reverse=number % 2 == 1):
            chosen = [adapters[place % count] if count else None for place in range(STREAMS)]
            rate = deployment.decode(chosen, num_tokens)
            if number:
                rates[count].append(rate)
    lines = [Result("base: tokens per second", median(rates[0]), "")]
    for count, target in TARGETS.items():
        ratio = median(own / base for own, base in zip(rates[count], rates[0], strict=True))
        lines.append(Result(f"{count} adapters: of the base's rate", ratio, "", at_least=target))
    return lines


def measure_loads(deployment: Deployment, paths: Sequence[Path], num_rounds: int) -> list[Result]:
    """Rounds take turns; the one before the first warms up."""
    first_steps: list[float] = []
    calm, beside = [], []  # of each round, between tokens, p99
    for number in range(num_rounds + 1):
        deployment.unload()
        chosen = [paths[(number * NUM_LOADS + index) % len(paths)] for index in range(NUM_LOADS)]
        without = deployment.come_and_go([None] * NUM_LOADS, 12 * NUM_LOADS)
        loads = deployment.come_and_go(chosen, 12 * NUM_LOADS)
        if number:
            first_steps += loads.first_steps
            calm.append(percentile(without.pauses, 99))
            beside.append(percentile(loads.pauses, 99))
    ratio = median(one / other for one, other in zip(beside, calm, strict=True))
    return [
        Result(
            "a new adapter: from the order to its first step", 1000 * median(first_steps), "ms", at_most=LOAD_TARGET
        ),
        Result("between the others' tokens, p99, without loads", 1000 * median(calm), "ms"),
        Result("beside loads, of that", ratio, "", at_most=PAUSE_TARGET),
    ]


def measure_peer(
    deployment: Deployment, adapters: Sequence[Adapter], paths: Sequence[Path], base: Path, peers: Path, rank: int
) -> list[Result]:
    """vLLM in the type that it is fastest in here.  Ends the program where the folder has none."""
    found = [one for one in engines(peers, "S", FULL) if one.name.startswith("vllm") and one.by_default]
    engine = next((one for one in found if not one.missing), None)
    if engine is None:
        raise SystemExit(f"--peers: {peers} has no vLLM")
    own = {"model": str(base), "adapters": [str(path) for path in paths], "max_lora_rank": rank}
    requests = [([3 + (7 * place + i) % 1000 for i in range(PROMPT)], PEER_TOKENS) for place in range(STREAMS)]
    lines = []
    child = EngineProcess(replace(engine, options=engine.options | own), paths[0].parent)
    try:
        for count in TARGETS:
            rates, theirs = [], []
            for _ in range(1 + PEER_ROUNDS):
                chosen = [adapters[place % count] for place in range(STREAMS)]
                rates.append(deployment.decode(chosen, PEER_TOKENS, with_prompts=True))
                with child.awake():
                    child.use_adapters(count)
                    theirs.append(STREAMS * PEER_TOKENS / child.run(requests, PEER_SECONDS)["seconds"])
            ratio = median(one / other for one, other in zip(rates[1:], theirs[1:], strict=True))  # the first warms up
            lines += [
                Result(f"{count} adapters: tokens per second of {child.version}", median(theirs[1:]), ""),
                Result(f"{count} adapters: ours, of these", ratio, "x", at_least=PEER_TARGET),
            ]
    finally:
        child.close()
    return lines


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", choices=["S", "M"], default="S")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    parser.add_argument("--threads", type=int, default=0, help="of the kernels; 0: one per core")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--peers", type=Path, help="a folder with vLLM, which is given the same adapters")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    gc.freeze()  # what was imported, as in a worker: a collection amid a load would look at all of it
    count = max(TARGETS)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        ensure(base := directory / args.model, args.model)
        paths = [
            write_adapter(base, directory / f"a{seed}", seed=seed, rank=args.rank, dtype=torch.bfloat16)
            for seed in range(count)
        ]
        settings = Settings.of(
            model=str(base), num_blocks=1024, max_num_seqs=STREAMS + 1, num_threads=args.threads, max_model_len=1024,
            dtype=args.dtype, quantization=args.quantization, max_loras=count + 1, max_cpu_loras=count + 1,
        )  # fmt: skip
        deployment = Deployment(settings)
        loaded = [deployment.load(path.name, path) for path in paths]
        lines = measure(deployment, [adapter for adapter, _ in loaded], args.rounds, args.tokens)
        seconds = median(seconds for _, seconds in loaded)
        lines.append(Result("loading an adapter", 1000 * seconds, "ms"))
        if args.peers:
            lines += measure_peer(
                deployment, [adapter for adapter, _ in loaded], paths, base, args.peers.resolve(), args.rank
            )
        lines += measure_loads(deployment, paths, args.rounds)
    return finish(lines, check=args.check, title=f"adapters of rank {args.rank} over model {args.model}")
