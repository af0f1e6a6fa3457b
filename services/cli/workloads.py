"""The load that a command line describes: options that the load generator and the simulator share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

import click
import msgspec

from services.cli.help import advanced
from shared.workload import (
    LoadRequest,
    Ramp,
    RandomLengths,
    arrival_times,
    at_times,
    ramp_times,
    random_requests,
    read_prompts,
    read_trace,
)

F = TypeVar("F", bound=Callable[..., Any])


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One field for each option, under the names that users of vLLM's `bench serve` know where there is such a one."""

    dataset_name: Literal["random", "custom", "trace"]
    dataset_path: Path | None
    num_prompts: int  # 0: all of a file
    random_input_len: int
    random_output_len: int
    random_prefix_len: int
    random_range_ratio: float
    custom_output_len: int
    chat: bool
    trace_speed: float
    trace_length_scale: float
    request_rate: float | None  # None: a trace's own times, else all at once
    burstiness: float
    ramp_up_strategy: Literal["linear", "exponential"] | None
    ramp_up_start_rps: float
    ramp_up_end_rps: float
    seed: int


def workload_options(command: F) -> F:
    """Add the options; `take_workload` takes them."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def take_workload(arguments: dict[str, Any]) -> WorkloadOptions:
    """Remove the workload's options from a command's arguments."""
    return WorkloadOptions(**{name: arguments.pop(name) for name in WorkloadOptions.__struct_fields__})


def requests_of(
    options: WorkloadOptions, vocab_size: int, *, max_model_len: int = 0, trace_speed: float = 0.0
) -> Iterator[LoadRequest]:
    """The requests with their times, in order; one seed gives one load.  Traces are cut to `max_model_len` (0: not).

    `trace_speed` stands in for the option's.  Raises click.ClickException on options or files that make no sense.
    """
    try:
        yield from _timed(options, vocab_size, max_model_len, trace_speed or options.trace_speed)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _timed(options: WorkloadOptions, vocab_size: int, longest: int, speed: float) -> Iterator[LoadRequest]:
    rng = Random(options.seed)
    if options.dataset_name == "trace" and options.request_rate is None and options.ramp_up_strategy is None:
        return _traced(options, longest, speed)
    requests = list(_untimed(options, vocab_size, longest, rng))
    if options.ramp_up_strategy is not None:
        ramp = Ramp(options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
        times = ramp_times(len(requests), ramp, options.burstiness, rng)
    else:
        rate = math.inf if options.request_rate is None else options.request_rate
        times = arrival_times(len(requests), rate, options.burstiness, rng)
    return iter(at_times(requests, times))


def _untimed(options: WorkloadOptions, vocab_size: int, longest: int, rng: Random) -> Iterator[LoadRequest]:
    if options.dataset_name == "trace":
        return _traced(options, longest, 1.0)
    if options.dataset_name == "custom":
        read = read_prompts(_path(options), options.custom_output_len, chat=options.chat)
        return islice(read, options.num_prompts or None)
    lengths = RandomLengths(
        options.random_input_len, options.random_output_len, options.random_prefix_len, options.random_range_ratio
    )
    return iter(random_requests(options.num_prompts or 1000, lengths, vocab_size, rng))


def _traced(options: WorkloadOptions, longest: int, speed: float) -> Iterator[LoadRequest]:
    trace = read_trace(_path(options))
    return trace.requests(options.num_prompts, speed=speed, length_scale=options.trace_length_scale, longest=longest)


def _path(options: WorkloadOptions) -> Path:
    if options.dataset_path is None:
        raise ValueError(f"--dataset-name {options.dataset_name} needs a --dataset-path")
    return options.dataset_path


PATH = click.Path(exists=True, dir_okay=False, path_type=Path)
OPTIONS = [
    click.option("--dataset-name", type=click.Choice(["random", "custom", "trace"]), default="random",
                 show_default=True, help="Random ids; a file of JSON lines; a trace (Mooncake .jsonl, Azure .csv)."),
    click.option("--dataset-path", type=PATH, help="The file of custom prompts, or the trace."),
    click.option("--num-prompts", type=click.IntRange(min=0), default=0,
                 help="Default: 1000 random ones, else the whole file.  A trace begins anew at its end."),
    click.option("--random-input-len", type=int, default=1024, show_default=True, help="Tokens of a random prompt."),
    click.option("--random-output-len", type=int, default=128, show_default=True, help="max_tokens of it."),
    click.option("--random-prefix-len", type=int, default=0, show_default=True, help="Tokens that all prompts share."),
    advanced("--random-range-ratio", type=float, default=0.0, show_default=True,
                 help="Lengths are uniform in [1 - r, 1 + r] of those named."),
    click.option("--custom-output-len", type=int, default=128, show_default=True, help="max_tokens of custom prompts."),
    click.option("--chat", is_flag=True, help="Send custom prompts as a user's turn of a chat."),
    advanced("--trace-speed", type=float, default=1.0, show_default=True, help="Times the traced rate."),
    advanced("--trace-length-scale", type=float, default=1.0, show_default=True, help="Times the traced ones."),
    click.option("--request-rate", type=float, help="Per second; inf: all at once.  Default: a trace's own, or inf."),
    advanced("--burstiness", type=float, default=1.0, show_default=True,
                 help="Shape of the gamma distribution of gaps: 1 Poisson, less burstier, inf constant."),
    advanced("--ramp-up-strategy", type=click.Choice(["linear", "exponential"]),
             help="How the rate grows from the first request to the last.  Default: it stays."),
    advanced("--ramp-up-start-rps", type=float, default=1.0, show_default=True, help="Rate of the first requests."),
    advanced("--ramp-up-end-rps", type=float, default=10.0, show_default=True, help="Rate of the last requests."),
    click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same load."),
]  # fmt: skip
