"""The options of `bench serve`, `bench offline`, `bench kernels` and `simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from services.cli.command_line.help import (
    COUNT,
    DIRECTORY,
    FILE,
    FROM_0,
    INTEGERS,
    NOT_NEGATIVE,
    NUMBERS,
    SHARE,
    WORDS,
    Shown,
    advanced,
)

POLICIES = "round_robin,least_loaded,prefix_aware"
GOODPUT = "An objective in milliseconds, as ttft:200, tpot:50 or e2el:5000."


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a load is sent, and what is reported of it."""

    backend: Annotated[
        Literal["pageant-grpc", "openai"],
        Shown("gRPC at --address, or the HTTP API of OpenAI's clients at --base-url."),
    ] = "pageant-grpc"
    address: Annotated[str, Shown("Where the gateway listens for gRPC.", envvar="PAGEANT_ADDRESS")] = "127.0.0.1:50051"
    base_url: Annotated[str, Shown("Where a server answers over HTTP.")] = "http://127.0.0.1:8000"
    request_rates: Annotated[
        Sequence[float] | None, Shown("In turn, as 1,2,4,inf: a run each, and a table.", NUMBERS)
    ] = None
    max_concurrency: Annotated[int, Shown("Open at once; 0: no limit.", FROM_0)] = 0
    num_warmups: Annotated[int, advanced("Requests before the measurement.", FROM_0)] = 1
    ignore_eos: Annotated[bool, Shown("Go on to max_tokens; random prompts and traces always do.")] = False
    goodput: Annotated[tuple[str, ...], Shown(GOODPUT)] = ()
    percentile_metrics: Annotated[
        Sequence[str], advanced("Figures whose percentiles are shown; also: e2el, tbt, tpot_with_first.", WORDS)
    ] = ("ttft", "tpot", "itl")
    metric_percentiles: Annotated[Sequence[float], advanced("Percentiles of them.", NUMBERS)] = (99.0,)
    mfu_model: Annotated[
        str, advanced("Report MFU for this model: a known shape as of `simulate`, or a directory with config.json.")
    ] = ""
    peak_tflops: Annotated[
        float,
        advanced("With --mfu-model: 10^12 floating point operations per second of all devices together.", NOT_NEGATIVE),
    ] = 0.0
    label: Annotated[str, advanced("A word that is kept in the result.")] = ""
    save_result: Annotated[bool, Shown("Write the figures as JSON.")] = False
    save_detailed: Annotated[bool, advanced("The same, with every request's figures.")] = False
    append_result: Annotated[bool, advanced("Add a line to the file instead of replacing it.")] = False
    result_dir: Annotated[Path, advanced("Where that file is written.", DIRECTORY)] = Path()
    result_filename: Annotated[str, advanced("Its name.  Default: made of backend, model and time.")] = ""
    plot: Annotated[
        Path | None, Shown("A PNG: latency over rate, throughput and latency, the course of each run.", FILE)
    ] = None
    ready_check_timeout_sec: Annotated[float, advanced("How long to wait for a server that is starting.")] = 60.0


class KernelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The operations that are timed."""

    model: Annotated[str, Shown("A directory, or a known name.", short="-m")] = "models/pageant-stories"
    rows: Annotated[Sequence[int], Shown("Tokens in a step.", INTEGERS)] = (1, 8, 32, 512)
    context: Annotated[int, Shown("Keys of a decoding row.", COUNT)] = 1024
    device: Annotated[Literal["cpu", "cuda"], Shown("Where they run.")] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16"], Shown("Type of the arithmetic.")] = "float32"
    threads: Annotated[int, Shown("Threads.  0: one per core.", FROM_0)] = 0


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated; every combination of the lists is tried."""

    workers: Annotated[Sequence[int], Shown("Numbers of workers to try.", INTEGERS)] = (1, 2, 4, 8)
    device: Annotated[str, Shown("Whose figures make the step time.")] = "h200"
    model: Annotated[str, Shown("A known shape, or a directory with config.json.")] = "llama-3-8b"
    recorded: Annotated[
        Path | None, Shown("Fit the step time to this instead: what a worker wrote (record_steps).", FILE)
    ] = None
    num_blocks: Annotated[
        Sequence[int] | None, Shown("KV blocks of a worker; default: what fits the device.", INTEGERS)
    ] = None
    block_size: Annotated[Sequence[int], advanced("Tokens in a KV block.", INTEGERS)] = (16,)
    max_num_batched_tokens: Annotated[Sequence[int], advanced("Tokens in one step.", INTEGERS)] = (2048,)
    routing_policy: Annotated[Sequence[str], Shown(f"Of {POLICIES}.", WORDS)] = ("prefix_aware",)
    max_num_seqs: Annotated[int, advanced("Sequences that run at once on each worker.", COUNT)] = 256
    max_model_len: Annotated[int, advanced("Longest prompt with its output.", COUNT)] = 131_072
    gpu_memory_utilization: Annotated[
        float, advanced("Share of the device's memory for weights, activations and KV cache.", SHARE)
    ] = 0.9
    enable_prefix_caching: Annotated[bool, advanced("Reuse the KV cache of equal prefixes.")] = True
    max_num_queued_reqs: Annotated[int, advanced("Requests that may wait.", COUNT)] = 1_000_000
    load_per_worker: Annotated[bool, Shown("A trace is so many times faster as there are workers.")] = False
    goodput: Annotated[tuple[str, ...], Shown(GOODPUT)] = ()
    attainment: Annotated[float, Shown("The share of requests that must meet the objectives.", SHARE)] = 0.99
    cost_per_worker: Annotated[float, Shown("Per hour, in any currency.")] = 1.0
    json: Annotated[Path | None, Shown("Write all figures to this file.", FILE)] = None
    plot: Annotated[Path | None, Shown("A PNG: latency, hit rate, preemptions and goodput over each choice.", FILE)] = (
        None
    )
