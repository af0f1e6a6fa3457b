"""Every figure that the GPU path has a target for, beside the ceilings of the card, measured in the same run.

    scripts/bench_gpu [--check] [--only WORD] [--tune]
    scripts/bench_gpu --dry-run      without a GPU: the plan, every kernel compiled for sm_90, a tiny model's steps

Ceilings: the bandwidth of a large copy (bytes read plus written), and the rate of a large product in bfloat16.  A floor
is the least time that the bytes or operations of a step can take at its ceiling; a figure is floor / measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from scripts.bench.gpu.shapes import LLAMA_3_8B, Shape
from scripts.bench.report import Line, add_check, finish

DECODES = ((1, 1024, 0.85), (64, 1024, 0.75), (256, 1024, 0.70))  # sequences, context, share of the floor
PROMPT, PROMPT_SHARE = 8192, 0.60
KERNEL_SEQS, KERNEL_CONTEXT, KERNEL_SHARE = 64, 4096, 0.80
GAP, STREAM_SHARE = 0.03, 0.95
BANDWIDTH, RATE = 4.3e12, 790e12  # of one H200, for the plan of a dry run only


class Bench:
    """Lines of the table, each measured when it is asked for."""

    def __init__(self, shape: Shape, directory: Path, bandwidth: float, rate: float) -> None:
        self._shape, self._directory = shape, directory
        self._bandwidth, self._rate = bandwidth, rate

    def parts(self) -> dict[str, Callable[[], list[Line]]]:
        return {
            "attention": self.attention,
            "steps": self.steps,
            "streams": self.streams,
            "transformers": self.transformers,
        }

    def attention(self) -> list[Line]:
        from scripts.bench.gpu.attention import Problem
        from scripts.bench.gpu.ceilings import seconds

        problem = Problem(self._shape, KERNEL_SEQS, KERNEL_CONTEXT, "cuda")
        floor = self._shape.attention_bytes(KERNEL_SEQS, KERNEL_CONTEXT) / self._bandwidth
        what = f"paged decode attention, batch {KERNEL_SEQS}, context {KERNEL_CONTEXT}: of copy bandwidth"
        lines = [Line(what, floor / seconds(problem.triton()), at_least=KERNEL_SHARE)]
        other = problem.flashinfer()
        note = "" if other else "not installed"
        lines.append(Line("the same in FlashInfer", floor / seconds(other) if other else None, note=note))
        return lines

    def steps(self) -> list[Line]:
        from scripts.bench.gpu.steps import NUM_STEPS, Runs

        largest = max(num_seqs for num_seqs, _, _ in DECODES)
        longest = PROMPT + 2 * NUM_STEPS
        runs = Runs(self._directory, self._shape, device="cuda", num_rows=largest, max_len=longest)
        lines = []
        for num_seqs, context, share in DECODES:
            device, host = runs.decode(num_seqs, context)
            floor = self._shape.decode_bytes(num_seqs, context) / self._bandwidth
            what = f"decode, batch {num_seqs}, context {context}"
            lines += [
                Line(f"{what}: of the floor", floor / device, at_least=share),
                Line(f"{what}: a step", device * 1000, "ms"),
                Line(f"{what}: gap between steps", max(0.0, host / device - 1), at_most=GAP),
            ]
        taken = runs.prefill(PROMPT)
        rate = self._shape.prefill_operations(PROMPT) / taken
        lines.append(Line(f"prefill of {PROMPT} tokens: of the matrix rate", rate / self._rate, at_least=PROMPT_SHARE))
        return lines

    def streams(self) -> list[Line]:
        from scripts.bench.gpu.others import STREAMS, troupe_throughput

        offline, streamed = (troupe_throughput(self._directory, offline=offline) for offline in (True, False))
        what = f"gRPC, {STREAMS} streams: of the offline rate"
        return [
            Line("offline", offline, "tokens/s"),
            Line(what, streamed / offline, at_least=STREAM_SHARE),
        ]

    def transformers(self) -> list[Line]:
        from scripts.bench.gpu.others import transformers_decode

        num_seqs, context, _ = DECODES[1]
        taken = transformers_decode(self._shape, self._directory, num_seqs, context)
        note = "" if taken else "not installed"
        what = f"transformers: decode, batch {num_seqs}, context {context}: a step"
        return [Line(what, None if taken is None else taken * 1000, "ms", note=note)]


def plan_lines(shape: Shape) -> list[Line]:
    """Floors at an H200's usual ceilings, so that a reader knows what to expect of each figure."""
    note = f"at {BANDWIDTH / 1e12:.1f} TB/s and {RATE / 1e12:.0f} TFLOP/s"
    lines = [
        Line("weights read by a step", shape.weight_bytes / 1e9, "GB"),
        Line("keys and values of a token", shape.kv_bytes_per_token / 1024, "KiB"),
    ]
    for num_seqs, context, share in DECODES:
        floor = shape.decode_bytes(num_seqs, context) / BANDWIDTH * 1000
        lines.append(Line(f"decode, batch {num_seqs}, context {context}: floor", floor, "ms", note=note))
        lines.append(Line("  and the step that meets the target", floor / share, "ms"))
    prefill = shape.prefill_operations(PROMPT) / RATE * 1000
    lines.append(Line(f"prefill of {PROMPT} tokens: floor", prefill, "ms", note=note))
    lines.append(Line("  and the step that meets the target", prefill / PROMPT_SHARE, "ms"))
    kernel = shape.attention_bytes(KERNEL_SEQS, KERNEL_CONTEXT) / BANDWIDTH * 1e6
    lines.append(Line(f"attention, batch {KERNEL_SEQS}, context {KERNEL_CONTEXT}: floor", kernel, "us", note=note))
    return lines


def measure(only: str, tune: bool) -> list[Line]:
    from scripts.bench.gpu.ceilings import copy_bandwidth, matrix_rate

    bandwidth, rate = copy_bandwidth(), matrix_rate()
    torch.cuda.empty_cache()
    lines = [Line("copy bandwidth", bandwidth / 1e12, "TB/s"), Line("matrix rate", rate / 1e12, "TFLOP/s")]
    if tune:
        from scripts.bench.gpu.attention import Problem
        from scripts.bench.gpu.attention import tune as tune_attention

        for taken, setting in tune_attention(Problem(LLAMA_3_8B, KERNEL_SEQS, KERNEL_CONTEXT, "cuda"))[:5]:
            lines.append(Line(f"attention with keys, warps, stages {setting}", taken * 1e6, "us"))
    with tempfile.TemporaryDirectory() as folder:
        for name, part in Bench(LLAMA_3_8B, LLAMA_3_8B.write(Path(folder)), bandwidth, rate).parts().items():
            if only in name:
                lines += part()
                torch.cuda.empty_cache()
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--dry-run", action="store_true", help="what would be measured, and that all of it would run")
    parser.add_argument("--only", default="", help="a part of the table: attention, steps, streams, transformers")
    parser.add_argument("--tune", action="store_true", help="try other launch settings of the attention kernel too")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    if args.dry_run:
        from scripts.bench.gpu.dry_run import rehearse

        return rehearse(plan_lines(LLAMA_3_8B))
    if not torch.cuda.is_available():
        print("torch sees no GPU here; --dry-run shows what would be measured on one", file=sys.stderr)
        return 1
    return finish(measure(args.only, args.tune), check=args.check, title=torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main())
