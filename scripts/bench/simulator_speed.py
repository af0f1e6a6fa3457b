"""How many requests an hour `pageant simulate` gets through on one core, with 64 workers and real traces.

    scripts/bench_simulator_speed [--check] [--requests 6000] [--traces ../shared/data/traces] [--profile]

Mooncake's conversations (12,000 tokens in, 343 out) and Azure's (1,155 and 211), each on 64 simulated H200 with an 8 B
model, prefix-aware routing, at a load that keeps them busy.  Time is the process's, not the wall's: the machine may be
shared.  The digest is of all that was simulated, so that a change which makes it faster can be seen to change nothing.
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
from hashlib import sha256
from pathlib import Path
from time import process_time

import msgspec

from scripts.bench.common.report import Result, bench_parser, finish
from services.cli.simulate import MANY_OBJECTS
from services.scheduler.state.policy import Policy
from services.simulator.hardware import DEVICES, Roofline, num_blocks, shape_of
from services.simulator.simulation import VOCAB_SIZE, Delays, Simulation
from shared.messages import WorkerCapacity
from shared.workload.traces import Trace, read_trace

NUM_WORKERS = 64
MAX_MODEL_LEN = 131072
PER_HOUR = 1_000_000


class SpeedLoad(msgspec.Struct, frozen=True):
    """A trace, how many times its own rate it is sent at, and blocks of how many tokens."""

    name: str
    file: str
    speed: float
    block_size: int


LOADS = (
    SpeedLoad("Mooncake's conversations", "mooncake-conversation.jsonl", 0.36 * NUM_WORKERS, 64),
    SpeedLoad("Azure's conversations", "azure-2023-conv.csv", 107.0, 16),
)


def simulation(load: SpeedLoad) -> Simulation:
    device, model = DEVICES["h200"], shape_of("llama-3-8b").work()
    blocks = num_blocks(device, model, load.block_size, 0.9)
    capacity = WorkerCapacity(blocks, load.block_size, 256, MAX_MODEL_LEN, VOCAB_SIZE, "m", "bfloat16", "h200")
    policy = Policy(max_num_queued_reqs=1 << 20, max_num_queued_tokens=1 << 40)
    return Simulation(policy, capacity, NUM_WORKERS, Roofline(device, model), Delays(), model)


def timed(load: SpeedLoad, trace: Trace, count: int) -> tuple[float, Simulation]:
    """Seconds of processor time, and the run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(MANY_OBJECTS, 20, 100)
    begin = process_time()
    run = simulation(load)
    run.run(trace.requests(count, speed=load.speed, longest=MAX_MODEL_LEN))
    return process_time() - begin, run


def digest(run: Simulation) -> str:
    """Of every request's times, of every gap, of what every worker did and of what it has cached."""
    said = [
        list(run.observer.records.values()),
        sorted(run.observer.gaps.items().items()),
        [(worker.free_at, worker.busy, worker.num_steps) for worker in run.workers.values()],
        [(replica.pool.hashes, list(replica.pool.available)) for replica in run.core.replicas.values()],
        run.usage,
    ]
    return sha256(msgspec.msgpack.encode(said)).hexdigest()[:16]


def traces_folder() -> Path:
    root = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("PAGEANT_TEST_DATA") or root.parent / "shared" / "data") / "traces"


def line_of(load: SpeedLoad, folder: Path, count: int, profile: cProfile.Profile | None) -> Result:
    if not (folder / load.file).is_file():
        return Result(load.name, None, "requests/hour", at_least=PER_HOUR, note=f"no {load.file} in {folder}")
    trace = read_trace(folder / load.file)
    if profile is not None:
        profile.enable()
    seconds, run = timed(load, trace, count)
    if profile is not None:
        profile.disable()
    num_steps = sum(worker.num_steps for worker in run.workers.values())
    note = f"{count} requests, {num_steps} steps in {seconds:.1f} s; digest {digest(run)}"
    return Result(load.name, 3600 * count / seconds, "requests/hour", at_least=PER_HOUR, note=note)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--requests", type=int, default=6000, help="of each trace")
    parser.add_argument("--traces", type=Path, default=traces_folder(), help="the folder that they are in")
    parser.add_argument("--only", choices=["mooncake", "azure"], help="one of them")
    parser.add_argument("--profile", action="store_true", help="say where the time goes; that takes some itself")
    args = parser.parse_args()
    profile = cProfile.Profile() if args.profile else None
    loads = [load for load in LOADS if load.file.startswith(args.only or "")]
    lines = [line_of(load, args.traces, args.requests, profile) for load in loads]
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    return finish(lines, check=args.check, title=f"simulated requests per hour, {NUM_WORKERS} workers")
