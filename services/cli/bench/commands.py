"""The `bench` commands and `simulate`.  What a command needs is imported when it runs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from services.cli.bench.options import KernelOptions, ServeOptions, SimulateOptions
from services.cli.command_line.help import DIRECTORY, INTEGERS, Group, SectionedCommand, field_options, take
from services.cli.command_line.options import sampling_options, settings_options, take_sampling, take_settings
from services.cli.command_line.workloads import WorkloadOptions
from shared.text.model_source import find_model_dir, resolve_model_dir

WHERE = ("backend", "address", "base_url")  # of a server, which `bench offline` starts itself
sampled_options = partial(sampling_options, without=("seed", "max_tokens", "min_tokens", "stop"))  # the workload's own


@click.group(cls=Group)
def bench() -> None:
    """Measure a server, an offline load, messages or kernels."""


@bench.command("serve")
@field_options(ServeOptions)
@field_options(WorkloadOptions)
@sampled_options
def bench_serve(**arguments: Any) -> None:
    """Send a load to a running server, each request when it is due, and report latencies and rates."""
    from services.cli.bench.serve import serve

    sys.exit(serve(take(ServeOptions, arguments), take(WorkloadOptions, arguments), take_sampling(arguments)))


@bench.command("offline")
@settings_options
@field_options(WorkloadOptions)
@field_options(ServeOptions, without=WHERE)
@sampled_options
def bench_offline(**arguments: Any) -> None:
    """Send a whole load to a private deployment at once, and report the rates."""
    from services.cli.bench.serve import offline

    settings, options = take_settings(arguments), take(ServeOptions, arguments)
    sys.exit(offline(settings, options, take(WorkloadOptions, arguments), take_sampling(arguments)))


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
@field_options(KernelOptions)
def bench_kernels(**arguments: Any) -> None:
    """Time the operations of a model's step, one by one."""
    from services.cli.bench.kernels import table

    arguments["model"] = str(find_model_dir(arguments["model"]) or arguments["model"])
    click.echo(table(take(KernelOptions, arguments)))


@click.command("simulate", cls=SectionedCommand)
@field_options(SimulateOptions)
@field_options(WorkloadOptions)
def simulate(**arguments: Any) -> None:
    """Predict what a load needs: the scheduler's own decisions in virtual time."""
    from services.cli.simulate import run

    sys.exit(run(take(SimulateOptions, arguments), take(WorkloadOptions, arguments)))
