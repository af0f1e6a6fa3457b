"""The load that a command line describes: options that the load generator and the simulator share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import click
import msgspec

from services.cli.command_line.help import EXISTING_FILE, FROM_0, Shown, advanced
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


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A load, under the names that users of vLLM's `bench serve` know where there is such a one."""

    dataset_name: Annotated[
        Literal["random", "custom", "trace"],
        Shown("Random ids; a file of JSON lines; a trace (Mooncake .jsonl, Azure .csv)."),
    ] = "random"
    dataset_path: Annotated[Path | None, Shown("The file of custom prompts, or the trace.", EXISTING_FILE)] = None
    num_prompts: Annotated[
        int, Shown("0: 1000 random ones, else the whole file.  A trace begins anew at its end.", FROM_0)
    ] = 0
    random_input_len: Annotated[int, Shown("Tokens of a random prompt.")] = 1024
    random_output_len: Annotated[int, Shown("max_tokens of it.")] = 128
    random_prefix_len: Annotated[int, Shown("Tokens that all prompts share.")] = 0
    random_range_ratio: Annotated[float, advanced("Lengths are uniform in [1 - r, 1 + r] of those named.")] = 0.0
    custom_output_len: Annotated[int, Shown("max_tokens of custom prompts.")] = 128
    chat: Annotated[bool, Shown("Send custom prompts as a user's turn of a chat.")] = False
    trace_speed: Annotated[float, advanced("Times the traced rate.")] = 1.0
    trace_length_scale: Annotated[float, advanced("Times the traced ones.")] = 1.0
    request_rate: Annotated[float | None, Shown("Per second; inf: all at once.  Default: a trace's own, or inf.")] = (
        None
    )
    burstiness: Annotated[
        float, advanced("Shape of the gamma distribution of gaps: 1 Poisson, less burstier, inf constant.")
    ] = 1.0
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None,
        advanced("How the rate grows from the first request to the last.  Default: it stays."),
    ] = None
    ramp_up_start_rps: Annotated[float, advanced("Rate of the first requests.")] = 1.0
    ramp_up_end_rps: Annotated[float, advanced("Rate of the last requests.")] = 10.0
    seed: Annotated[int, Shown("The same seed gives the same load.")] = 0


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
