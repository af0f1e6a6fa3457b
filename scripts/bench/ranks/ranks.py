"""What a group of ranks costs: its steps beside those of one worker with as many threads, and a gather alone.

    scripts/bench_ranks [--check] [--models DIR] [--model S] [--ranks 2] [--rounds 7] [--steps 8] [--dtype auto]
                        [--executor local] [--stages] [--experts] [--balanced] [--torch] [--gathers]

One worker with a thread for each rank, and a group of as many ranks with a thread each, decode the same rows; both are
there all the time, and rounds of them take turns, so that a machine whose speed drifts slows both.  Ratios are medians
of those of rounds.  Both must say the same tokens.  `--executor hosts`: the ranks share no memory; TCP on loopback is
between them.  `--stages`: the group is a pipeline (stages.py), at the largest number of rows.  `--experts`: its
ranks have whole experts, of a model that has any (`--model moe`).  `--balanced`: whole experts, of which tokens take
only those that the first rank has at its start; beside one another a group that leaves them there, and one that moves
them (`enable_eplb`), both with whole processes to themselves in turns.  `--torch`: ranks compute with torch, and
exchange by gloo, in each of the ways that there are.

A gather is what two ranks need to have so many bytes of each other: a meeting and the copies around it; beside it what
torch.distributed (gloo) takes for the same.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from engine.modeling.ranks.ranks import SPINS, SPINS_CROWDED
from kernels.cpu.binding import abi
from kernels.cpu.binding.loading import load
from kernels.cpu.binding.native import Native
from scripts.bench.common.models import kept
from scripts.bench.common.proc import processor
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.kernels.decoded_rows import PROMPT, DecodedRows, beside
from scripts.bench.ranks.balanced_experts import measure_balanced
from scripts.bench.ranks.stages import measure_stages
from services.worker.groups.rank_processes import start_ranks
from services.worker.groups.ranks import HostGroup, StagesOfRanks, WatchedRanks, make_group
from shared.config import Settings, settings_environment
from shared.data_link.addresses import prepare

ROWS = (1, 8, 32)
NATIVE, GATHER_US = "native", 5.0
MOST = {NATIVE: 1.2}  # targets, of one worker's time
DUAL = {"enable_dbo": True, "dbo_token_threshold": 2}
TORCH_WAYS: Mapping[str, Mapping[str, Any]] = {
    "gather": {},
    "gather, dual batch": DUAL,
    "reduce": {"tensor_parallel_reduce": True},
    "reduce, dual batch": {"tensor_parallel_reduce": True, **DUAL},
}
GATHER_BYTES, GATHERS, GLOO_GATHERS = (4096, 65536), 10000, 2000


def measure(
    alone: ModelRunner,
    groups: Mapping[str, ModelRunner],
    set_threads: Callable[[int], object],
    args: argparse.Namespace,
) -> list[Result]:
    """A line for each number of rows and group.  Raises RuntimeError where ranks that gather say different tokens."""
    found = []
    for rows in ROWS:
        one = DecodedRows(alone, rows, args.rounds * args.steps, partial(set_threads, args.ranks))
        each = {
            name: DecodedRows(runner, rows, args.rounds * args.steps, partial(set_threads, 1))
            for name, runner in groups.items()
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        for _ in range(args.rounds):
            seconds, wanted = one.steps(args.steps)
            for name, run in each.items():
                own, tokens = run.steps(args.steps)
                if tokens != wanted and not name.startswith("reduce"):
                    raise RuntimeError(f"{args.ranks} ranks ({name}) say other tokens than one worker at {rows} rows")
                times[name].append((seconds, own))
        for name, pairs in times.items():
            ratio = median(own / seconds for seconds, own in pairs)
            what = f"step of {args.ranks} ranks, {rows} rows, {name}"
            found.append(Result(what, ratio, "x", at_most=MOST.get(name), note=beside(pairs)))
    return found


Gather = Callable[[int], "np.ndarray[Any, Any]"]  # by one of two ranks: nanoseconds of each


def gather_seconds(gather: Gather) -> float:
    """The median of gathers between this process and a fork of it, each on a core of its own where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    child = os.fork()
    rank = int(child == 0)
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    times = gather(rank)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    os.sched_setaffinity(0, cores)
    return float(np.median(times)) * 1e-9


def native_gather(native: Native, num_bytes: int, *, tcp: bool) -> Gather:
    """Of this library: over shared memory, or over TCP between ranks that have each its own."""
    hidden, crowded = num_bytes // 2, len(os.sched_getaffinity(0)) < 2
    sizes = {"attended": hidden, "inner": hidden, "vocab": 32, "max_tokens": 4, "max_seqs": 4, "max_rows": 4}
    group = abi.PgGroup(ranks=2, spins=SPINS_CROWDED if crowded else SPINS, table_columns=4, **sizes)
    group.bytes = native.group_bytes(group, hidden)
    memory = mmap.mmap(-1, group.bytes, flags=mmap.MAP_PRIVATE if tcp else mmap.MAP_SHARED)
    group.memory = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    ends = connected_pair() if tcp else ()

    def gather(rank: int) -> np.ndarray[Any, Any]:
        group.rank = rank
        if tcp:
            group.links = (ctypes.c_int32 * 1)(ends[rank].fileno())
        times = native.gather(group, hidden, num_bytes, GATHERS)
        assert memory  # it is read until here
        return times

    return gather


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Over loopback, prepared as those of ranks are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        prepare(end)
        end.setblocking(True)
    return one, other


def gloo_gather(num_bytes: int) -> Gather:
    """Of torch.distributed, over TCP on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def gather(rank: int) -> np.ndarray[Any, Any]:
        torch.set_num_threads(1)  # a fork has none of OpenMP's threads, and would wait for them for ever
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        own, *whole = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(3))
        times = np.zeros(GLOO_GATHERS, np.int64)
        for i in range(GLOO_GATHERS):
            torch.distributed.barrier()
            begin = time.perf_counter_ns()
            torch.distributed.all_gather(whole, own)
            times[i] = time.perf_counter_ns() - begin
        torch.distributed.destroy_process_group()
        return times

    return gather


def gathers(native: Native) -> list[Result]:
    """All ways that a gather may go; those over TCP have no target."""
    found = []
    for num_bytes in GATHER_BYTES:
        size = f"gather of {num_bytes >> 10} KB between two ranks, median"
        most = GATHER_US if num_bytes == GATHER_BYTES[0] else None
        ways = {
            "shared memory": native_gather(native, num_bytes, tcp=False),
            "TCP": native_gather(native, num_bytes, tcp=True),
            "gloo": gloo_gather(num_bytes),
        }
        for name, way in ways.items():
            at_most = most if name == "shared memory" else None
            found.append(Result(f"{size}, {name}", 1e6 * gather_seconds(way), "us", at_most=at_most))
    return found


@contextmanager
def grouped(
    settings: Settings, ranks: int, kind: str, *, experts: bool = False
) -> Iterator[tuple[ModelRunner, WatchedRanks | StagesOfRanks]]:
    """`kind`: the setting that says how many ranks there are; `experts`: these have whole ones."""
    own = settings.replace(**{kind: ranks}, num_threads=1, rank_port=0, enable_expert_parallel=experts)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        own = own.replace(runtime_dir=directory)
        group = make_group(own, start_ranks(own), on_failure=lambda: None)
        assert group is not None
        stack.callback(group.close)
        if isinstance(group, HostGroup):
            environment = os.environ | settings_environment(own)
            for _ in range(1, ranks):
                program = [sys.executable, "-m", "services.worker.hosts", f"tcp://127.0.0.1:{group.port}"]
                stack.callback(subprocess.Popen(program, env=environment).wait)
        yield load_runner(own, ranks=group), group


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="S", help="a name of scripts/bench/common/specs.py")
    parser.add_argument(
        "--models", type=Path, help="where the model is, or is made and kept; default: made for this run"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--executor", default="local", choices=("local", "hosts"), help="of the ranks, as the setting")
    parser.add_argument("--stages", action="store_true", help="a pipeline of stages in the place of ranks")
    parser.add_argument("--experts", action="store_true", help="each rank has some experts whole")
    parser.add_argument("--balanced", action="store_true", help="whole experts, moved by what tokens take")
    parser.add_argument("--torch", action="store_true", help="ranks that compute with torch, over gloo")
    parser.add_argument("--gathers", action="store_true", help="measure gathers alone")
    parser.add_argument("--dtype", default="auto", help="of the arithmetic, as the setting")
    args = parser.parse_args()
    native = load()
    gathered = [] if args.stages or args.balanced or args.torch else gathers(native)
    if args.gathers:
        return finish(gathered, check=args.check, title=f"gathers; {processor()}")
    kind = "pipeline_parallel_size" if args.stages else "tensor_parallel_size"
    own = partial(grouped, ranks=args.ranks, kind=kind, experts=args.experts or args.balanced)
    with kept(args.models, args.model) as model, ExitStack() as stack:
        longest = PROMPT + 2 * args.rounds * args.steps + 1
        settings = Settings.of(
            model=str(model), dtype=args.dtype, num_threads=args.ranks, max_model_len=longest,
            num_blocks=max(ROWS) * 64, executor=args.executor,
        )  # fmt: skip
        if args.balanced:
            lines = measure_balanced(settings, own, args.steps)
            return finish(lines, check=args.check, title=f"whole experts, model {args.model}; {processor()}")
        if args.torch:
            settings = settings.replace(device="cpu", kernels="torch")
        alone, ways = load_runner(settings), TORCH_WAYS if args.torch else {NATIVE: {}}
        groups = {name: stack.enter_context(own(settings.replace(**way))) for name, way in ways.items()}
        if args.stages:
            lines = measure_stages(native, alone, *groups[NATIVE], max(ROWS), args.rounds, args.steps)
        else:
            set_threads = torch.set_num_threads if args.torch else partial(native.set_threads, pin=False)
            lines = measure(alone, {name: runner for name, (runner, _) in groups.items()}, set_threads, args)
    what = "stages" if args.stages else "torch ranks" if args.torch else "ranks"
    what += " with whole experts" if args.experts else ""
    return finish([*lines, *gathered], check=args.check, title=f"{what}, model {args.model}; {processor()}")
