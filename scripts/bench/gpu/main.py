"""Every figure that the GPU path has a target for, beside the ceilings of the card, measured in the same run.

    scripts/bench_gpu [--check] [--only PART,...] [--tune] [--soak-seconds N] [--programmatic-launch]

Ceilings: the bandwidth of a large copy (bytes read plus written), and the rate of a large product in bfloat16.  A floor
is the least time that the bytes or operations of a step can take at its ceiling; a figure is floor / measured.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import structlog
import torch

from scripts.bench.common.report import Result, bench_parser, finish, table
from scripts.bench.gpu import others
from scripts.bench.gpu.attention import Problem, copy_bandwidth, matrix_rate, seconds, seconds_in_graph, tune
from scripts.bench.gpu.experts import measure_experts
from scripts.bench.gpu.linears import measure_linears
from scripts.bench.gpu.shapes import LLAMA_3_8B, GpuModelShape
from scripts.bench.gpu.soak import soaked
from scripts.bench.gpu.steps import CHUNK, NUM_STEPS, Runs, offline_throughput
from scripts.bench.gpu.timeline import measure as measure_timeline
from scripts.bench.gpu.timeline import read_events, record_timeline

DECODES = ((1, 1024, 0.85), (64, 1024, 0.75), (256, 1024, 0.70))  # sequences, context, share of the floor
PROMPT, PROMPT_SHARE = 8192, 0.60
KERNEL_SEQS, KERNEL_CONTEXT, KERNEL_SHARE = 64, 4096, 0.80
GAP, STREAM_SHARE, MEMORY = 0.03, 0.95, 0.02
MISSING = "not installed"
PARTS = ("attention", "linears", "steps", "streams", "timeline", "vllm", "soak")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """As measured in this run."""

    bandwidth: float  # bytes/s, read and written
    rate: float  # operations/s in bfloat16


@dataclass(slots=True)
class Options:
    """What was asked for, and figures that later parts are held against."""

    trace: Path
    soak_seconds: float
    early: bool = False  # kernels of a step of one token may begin early
    offline: float | None = None  # tokens/s


class GpuBench:
    """Lines of the table, each measured when it is asked for."""

    def __init__(self, shape: GpuModelShape, directory: Path, ceilings: Ceilings, options: Options) -> None:
        self._shape, self._directory = shape, directory
        self._ceilings, self._options = ceilings, options
        self._work = shape.work()

    def attention(self) -> list[Result]:
        problem = Problem(self._shape, KERNEL_SEQS, KERNEL_CONTEXT, "cuda")
        per_layer = self._work.kv_bytes_per_token // self._shape.num_hidden_layers
        floor = KERNEL_SEQS * KERNEL_CONTEXT * per_layer / self._ceilings.bandwidth
        what = f"paged decode attention, batch {KERNEL_SEQS}, context {KERNEL_CONTEXT}: of copy bandwidth"
        lines = [Result(what, floor / seconds_in_graph(problem.triton()), at_least=KERNEL_SHARE)]
        other = problem.flashinfer()
        note = "" if other else MISSING
        lines.append(Result("the same in FlashInfer", floor / seconds(other) if other else None, note=note))
        return lines

    def linears(self) -> list[Result]:
        """Of dense layers and of experts."""
        return measure_linears(self._ceilings.bandwidth) + measure_experts(self._ceilings.bandwidth)

    def steps(self) -> list[Result]:
        """Decodes, a prompt and a whole load, planned by the scheduler's core in this process."""
        largest = max(num_seqs for num_seqs, _, _ in DECODES)
        longest = PROMPT + 2 * NUM_STEPS
        runs = Runs(self._directory, device="cuda", num_rows=largest, max_len=longest, early=self._options.early)
        lines = [line for decode in DECODES for line in self._decode(runs, *decode)]
        taken = runs.prefill(PROMPT)
        rate = self._work.flops(PROMPT, 1, PROMPT * PROMPT // 2) / taken / self._ceilings.rate
        lines.append(Result(f"prefill of {PROMPT} tokens: of the matrix rate", rate, at_least=PROMPT_SHARE))
        self._options.offline = offline_throughput(runs.runner, others.PROMPTS, others.INPUT, others.OUTPUT, CHUNK)
        lines.append(Result("offline: scheduler and runner in one process", self._options.offline, "tokens/s"))
        return lines

    def _decode(self, runs: Runs, num_seqs: int, context: int, share: float) -> list[Result]:
        device, host = runs.decode(num_seqs, context)
        read = self._work.weight_bytes + num_seqs * context * self._work.kv_bytes_per_token
        floor = read / self._ceilings.bandwidth
        what = f"decode, batch {num_seqs}, context {context}"
        return [
            Result(f"{what}: of the floor", floor / device, at_least=share),
            Result(f"{what}: a step", device * 1000, "ms"),
            Result(f"{what}: host's time beyond it", max(0.0, host / device - 1)),
        ]

    def streams(self) -> list[Result]:
        streamed, offline = others.served_throughput(self._directory), self._options.offline
        note = "" if streamed else MISSING
        share = streamed / offline if streamed and offline else None
        return [
            Result(f"gRPC, {others.STREAMS} streams", streamed, "tokens/s", note=note),
            Result(f"gRPC, {others.STREAMS} streams: of the offline rate", share, at_least=STREAM_SHARE, note=note),
        ]

    def timeline(self) -> list[Result]:
        """Of the device, while a deployment's scheduler plans and its sockets carry."""
        num_seqs, context, _ = DECODES[1]
        what = f"decode, batch {num_seqs}, context {context}, through scheduler and sockets"
        if find_spec("grpc") is None:
            return [Result(f"{what}: gap between steps", None, at_most=GAP, note=MISSING)]
        kept = self._options.trace
        kept.parent.mkdir(parents=True, exist_ok=True)
        record_timeline(self._directory, kept, device="cuda", num_seqs=num_seqs, context=context, num_output=256)
        found = measure_timeline(read_events(kept))
        return [
            Result(f"{what}: gap between steps", found.gap / found.step, at_most=GAP, note=f"timeline in {kept}"),
            Result(f"{what}: a step", found.step * 1000, "ms"),
            Result(f"{what}: nothing runs on the device", found.idle),
        ]

    def vllm(self) -> list[Result]:
        other, own = others.vllm_throughput(self._directory), self._options.offline
        note = "" if other else MISSING
        lines = [Result("vLLM, the same load at once", other, "tokens/s", note=note)]
        if other and own:
            lines.append(Result("offline, of vLLM's rate", own / other, at_least=1))
        return lines

    def soak(self) -> list[Result]:
        asked, taken, num_steps = soaked(self._directory, self._options.soak_seconds)
        note = f"{num_steps} steps in {self._options.soak_seconds:.0f} s; asked for {asked:.2f}"
        off = abs(taken - asked)
        return [Result("soak: memory taken, off what was asked for", off, "of the card", at_most=MEMORY, note=note)]


def measure(only: str, is_tuned: bool, options: Options) -> list[Result]:
    ceilings = Ceilings(copy_bandwidth(), matrix_rate())
    torch.cuda.empty_cache()
    lines = [
        Result("copy bandwidth", ceilings.bandwidth / 1e12, "TB/s"),
        Result("matrix rate", ceilings.rate / 1e12, "TFLOP/s"),
    ]
    if is_tuned:
        for taken, setting in tune(Problem(LLAMA_3_8B, KERNEL_SEQS, KERNEL_CONTEXT, "cuda"))[:5]:
            lines.append(Result(f"attention with keys, warps, stages {setting}", taken * 1e6, "us"))
    with tempfile.TemporaryDirectory() as folder:
        bench = GpuBench(LLAMA_3_8B, LLAMA_3_8B.write(Path(folder)), ceilings, options)
        for name in PARTS:
            if not only or name in only.split(","):
                lines += _run(name, bench)
    return lines


def _run(name: str, bench: GpuBench) -> list[Result]:
    """What one part cannot do costs its lines, and no other's."""
    try:
        found: list[Result] = getattr(bench, name)()
    except Exception as error:
        traceback.print_exc()
        found = [Result(name, None, at_least=1, note=f"failed: {type(error).__name__}: {error}"[:200])]
    gc.collect()
    torch.cuda.empty_cache()
    print(f"\n{table(found, title=name)}", flush=True)
    return found


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", default="", help=f"parts of the table, by commas: {', '.join(PARTS)}")
    parser.add_argument("--tune", action="store_true", help="try other launch settings of the attention kernel too")
    parser.add_argument("--trace", type=Path, default=Path("timeline.json"), help="where the device's timeline is kept")
    parser.add_argument("--soak-seconds", type=float, default=60, help="how long the soak is")
    parser.add_argument("--programmatic-launch", action="store_true", help="decodes with this setting")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    if not torch.cuda.is_available():
        print("torch sees no GPU here", file=sys.stderr)
        return 1
    options = Options(args.trace, args.soak_seconds, args.programmatic_launch)
    return finish(measure(args.only, args.tune, options), check=args.check, title=torch.cuda.get_device_name())
