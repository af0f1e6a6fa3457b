"""What the digest of a checkpoint's weights adds to the time of their loading, in turns within one run.

    scripts/bench_digest [--check] [--rounds 15] [--threads 0] [--layers 24] [--only NAME ...]

A Llama checkpoint of 0.7 GB with random weights in bfloat16 is loaded with a digest, which no earlier load has left
behind, and without one: from the disk, as a file is loaded for the first time, and from the page cache.  Of a file that
was loaded before, the digest is remembered, so the second costs it only where the file was written just before.

A figure is the median of the rounds; what is added is the median of what the loads of one round differ by, since other
work on the machine changes more slowly than that.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import structlog

from engine.loading.fingerprint import processor
from engine.loading.load import load_model
from engine.weights.digest import DigestMemory
from kernels.cpu.binding.loading import load_compiled
from scripts.bench.common.models import write_config, write_weights
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.common.specs import llama
from shared.config import Settings
from shared.errors import ConfigError

WEIGHTS = "model.safetensors"
TARGET = 3.0  # percent of the time of a load
SETUPS: dict[str, dict[str, object]] = {  # the native kernels take torch's threads away, so they come after it
    "torch": {"kernels": "torch"},
    "native, bfloat16": {"kernels": "native", "dtype": "bfloat16"},
    "native, int8": {"kernels": "native", "quantization": "int8"},
    "native, int4": {"kernels": "native", "quantization": "int4"},
}
Times = list[tuple[float, float]]  # seconds of a load without a digest, and with one


def write_checkpoint(directory: Path, num_layers: int) -> int:
    """Its bytes."""
    config = llama(1024, 2816, num_layers, (16, 8), 32000, max_position_embeddings=1024)
    write_config(directory, config)
    write_weights(directory, config)
    path = directory / WEIGHTS
    path.read_bytes()  # into the page cache, were it not there from writing
    return path.stat().st_size


def load(settings: Settings, memory: DigestMemory | None, *, from_disk: bool) -> float:
    """Seconds."""
    gc.collect()
    if from_disk:
        drop_pages(Path(settings.engine.model) / WEIGHTS)
    begin = time.perf_counter()
    load_model(settings, digests=memory)
    return time.perf_counter() - begin


def drop_pages(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(settings: Settings, memories: Path, num_rounds: int, *, from_disk: bool) -> Times:
    """Each round loads both ways, first the one and then the other by turns; the round before the first warms up."""
    times: Times = []
    for number in range(num_rounds + 1):
        taken = {}
        for digested in (False, True) if number % 2 else (True, False):
            memory = DigestMemory(Path(tempfile.mkdtemp(dir=memories))) if digested else None
            taken[digested] = load(settings, memory, from_disk=from_disk)
        if number:
            times.append((taken[False], taken[True]))
    return times


def report(name: str, times: Times) -> list[Result]:
    without, digested = (median(column) for column in zip(*times, strict=True))
    added = median(with_it - without_it for without_it, with_it in times)
    return [
        Result(f"{name}: load without a digest", 1000 * without, "ms"),
        Result(f"{name}: load with a digest", 1000 * digested, "ms"),
        Result(f"{name}: added", 100 * added / without, "%", at_most=TARGET),
    ]


def measure_all(directory: Path, names: Sequence[str], num_threads: int, num_rounds: int) -> list[Result]:
    load_compiled()  # checks the library, once per process
    shared = Settings.of(model=str(directory), num_blocks=8, num_threads=num_threads)
    lines = []
    for name in names:
        memories = directory / name
        memories.mkdir()
        settings = shared.replace(**SETUPS[name])
        for place in ("disk", "page cache"):
            try:
                times = measure(settings, memories, num_rounds, from_disk=place == "disk")
            except ConfigError as error:
                print(f"{name}: left out, {error}", flush=True)
                break
            lines += report(f"{name}, from the {place}", times)
    return lines


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="of the kernels; 0: one per core")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=list(SETUPS), default=list(SETUPS), help="these set-ups")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    with tempfile.TemporaryDirectory() as directory:
        num_bytes = write_checkpoint(Path(directory), args.layers)
        print(f"{num_bytes / 1e9:.2f} GB in bfloat16; {processor()}, {os.cpu_count()} cores", flush=True)
        lines = measure_all(Path(directory), args.only, args.threads, args.rounds)
    return finish(lines, check=args.check, title="what a digest of the weights adds to their loading")
