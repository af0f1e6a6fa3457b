"""The `bench` commands and `simulate`.  What a command needs is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from services.cli.help import Group, advanced, command
from services.cli.lists import INTEGERS, NUMBERS, WORDS
from services.cli.options import SAMPLING, sampling_option, settings_options, take_settings
from services.cli.workloads import take_workload, workload_options
from shared.model_source import find_model_dir, resolve_model_dir

DIRECTORY = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
POLICIES = "round_robin,least_loaded,prefix_aware"


@click.group(cls=Group)
def bench() -> None:
    """Measure a server, an offline load, messages or kernels."""


MEASURING = [
    click.option("--request-rates", type=NUMBERS, help="In turn, as 1,2,4,inf: a run each, and a table."),
    click.option("--max-concurrency", type=click.IntRange(min=0), default=0, help="Open at once; 0: no limit."),
    advanced("--num-warmups", type=click.IntRange(min=0), default=1, show_default=True,
             help="Requests before the measurement."),
    click.option("--ignore-eos", is_flag=True, help="Go on to max_tokens; random prompts and traces always do."),
    click.option("--goodput", multiple=True, help="An objective in milliseconds, as ttft:200, tpot:50 or e2el:5000."),
    advanced("--percentile-metrics", type=WORDS, default="ttft,tpot,itl", show_default=True,
                 help="Figures whose percentiles are shown; also: e2el, tbt, tpot_with_first."),
    advanced("--metric-percentiles", type=NUMBERS, default="99", show_default=True, help="Percentiles of them."),
    advanced("--mfu-model", default="",
             help="Report MFU for this model: a known shape as of `simulate`, or a directory with config.json."),
    advanced("--peak-tflops", type=click.FloatRange(min=0), default=0.0,
             help="With --mfu-model: 10^12 floating point operations per second of all devices together."),
    advanced("--label", default="", help="A word that is kept in the result."),
    click.option("--save-result", is_flag=True, help="Write the figures as JSON."),
    advanced("--save-detailed", is_flag=True, help="The same, with every request's figures."),
    advanced("--append-result", is_flag=True, help="Add a line to the file instead of replacing it."),
    advanced("--result-dir", type=DIRECTORY, default=".", show_default=True, help="Where that file is written."),
    advanced("--result-filename", default="", help="Its name.  Default: made of backend, model and time."),
    click.option("--plot", type=FILE, help="A PNG: latency over rate, throughput and latency, the course of each run."),
    advanced("--ready-check-timeout-sec", type=float, default=60.0, show_default=True,
             help="How long to wait for a server that is starting."),
]  # fmt: skip


SAMPLED = [name for name in SAMPLING if name not in ("seed", "max_tokens", "min_tokens")]  # those are the workload's


def measuring_options(function: Any) -> Any:
    """Add what `ServeOptions` holds, but for the address, and what is said of sampling."""
    for name in reversed(SAMPLED):
        function = sampling_option(name)(function)
    for option in reversed(MEASURING):
        function = option(function)
    return function


def take_sampling(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling parameters: those that were given."""
    given = {name: arguments.pop(name) for name in SAMPLED}
    return {name: value for name, value in given.items() if value is not None}


@bench.command("serve")
@click.option(
    "--backend",
    type=click.Choice(["pageant-grpc", "openai"]),
    default="pageant-grpc",
    show_default=True,
    help="gRPC at --address, or the HTTP API of OpenAI's clients at --base-url.",
)
@click.option(
    "--address",
    default="127.0.0.1:50051",
    envvar="PAGEANT_ADDRESS",
    show_default=True,
    help="Where the gateway listens for gRPC.",
)
@click.option(
    "--base-url", default="http://127.0.0.1:8000", show_default=True, help="Where a server answers over HTTP."
)
@workload_options
@measuring_options
def bench_serve(**arguments: Any) -> None:
    """Send a load to a running server, each request when it is due, and report latencies and rates."""
    from services.cli.bench.serve import ServeOptions, serve

    sampling, workload = take_sampling(arguments), take_workload(arguments)
    sys.exit(serve(ServeOptions(**arguments), workload, sampling))


@bench.command("offline")
@settings_options
@workload_options
@measuring_options
def bench_offline(**arguments: Any) -> None:
    """Send a whole load to a private deployment at once, and report the rates."""
    from services.cli.bench.offline import offline
    from services.cli.bench.serve import ServeOptions

    settings, sampling, workload = take_settings(arguments), take_sampling(arguments), take_workload(arguments)
    sys.exit(
        offline(
            settings, ServeOptions(backend="pageant-grpc", address="", base_url="", **arguments), workload, sampling
        )
    )


@bench.command("messages")
@click.option("--sizes", type=INTEGERS, default="1,64,1024", show_default=True, help="Sequences in a step.")
@click.option(
    "--model", "-m", type=DIRECTORY, default="models/pageant-stories", show_default=True, help="A checkpoint directory."
)
def bench_messages(sizes: list[int], model: Path) -> None:
    """Time the encoding and decoding of the messages of one step."""
    from services.cli.bench.messages import table

    click.echo(table(sizes, resolve_model_dir(str(model))))


@bench.command("kernels")
@click.option(
    "--model", "-m", default="models/pageant-stories", show_default=True, help="A directory, or a known name."
)
@click.option("--rows", type=INTEGERS, default="1,8,32,512", show_default=True, help="Tokens in a step.")
@click.option("--context", type=click.IntRange(min=1), default=1024, show_default=True, help="Keys of a decoding row.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where they run.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of the arithmetic.",
)
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Threads.  0: one per core.")
def bench_kernels(**arguments: Any) -> None:
    """Time the operations of a model's step, one by one."""
    from services.cli.bench.kernels import table

    arguments["model"] = str(find_model_dir(arguments["model"]) or arguments["model"])
    click.echo(table(**arguments))


@command("simulate")
@click.option("--workers", type=INTEGERS, default="1,2,4,8", show_default=True, help="Numbers of workers to try.")
@click.option("--device", default="h200", show_default=True, help="Whose figures make the step time.")
@click.option(
    "--model", default="llama-3-8b", show_default=True, help="A known shape, or a directory with config.json."
)
@click.option("--recorded", type=FILE, help="Fit the step time to this instead: what a worker wrote (record_steps).")
@click.option("--num-blocks", type=INTEGERS, help="KV blocks of a worker; default: what fits the device.")
@advanced("--block-size", type=INTEGERS, default="16", show_default=True, help="Tokens in a KV block.")
@advanced("--max-num-batched-tokens", type=INTEGERS, default="2048", show_default=True, help="Tokens in one step.")
@click.option("--routing-policy", type=WORDS, default="prefix_aware", show_default=True, help=f"Of {POLICIES}.")
@advanced(
    "--max-num-seqs",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Sequences that run at once on each worker.",
)
@advanced(
    "--max-model-len",
    type=click.IntRange(min=2),
    default=131_072,
    show_default=True,
    help="Longest prompt with its output.",
)
@advanced(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of the device's memory for weights, activations and KV cache.",
)
@advanced(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=True,
    show_default=True,
    help="Reuse the KV cache of equal prefixes.",
)
@advanced(
    "--max-num-queued-reqs",
    type=click.IntRange(min=1),
    default=1_000_000,
    show_default=True,
    help="Requests that may wait.",
)
@click.option("--load-per-worker", is_flag=True, help="A trace is so many times faster as there are workers.")
@click.option("--goodput", multiple=True, help="An objective in milliseconds, as ttft:200, tpot:50 or e2el:5000.")
@click.option(
    "--attainment",
    type=click.FloatRange(0, 1),
    default=0.99,
    show_default=True,
    help="The share of requests that must meet the objectives.",
)
@click.option("--cost-per-worker", type=float, default=1.0, show_default=True, help="Per hour, in any currency.")
@click.option("--json", type=FILE, help="Write all figures to this file.")
@click.option("--plot", type=FILE, help="A PNG: latency, hit rate, preemptions and goodput over each choice.")
@workload_options
def simulate(**arguments: Any) -> None:
    """Predict what a load needs: the scheduler's own decisions in virtual time."""
    from services.cli.simulate import SimulateOptions, run

    workload = take_workload(arguments)
    sys.exit(run(SimulateOptions(**arguments), workload))  # fmt: skip
