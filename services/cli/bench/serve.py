"""`pageant bench serve`: a workload against a server that runs, at one rate or at several in turn."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
import grpc
import msgspec
import uvloop
from tqdm import tqdm

from services.cli.bench.generator import Generator, RequestOutcome, ServerBackend, lateness
from services.cli.bench.grpc_backend import GrpcBackend
from services.cli.bench.options import ServeOptions
from services.cli.bench.report import Report, RunOptions, as_json, block, figures, report_of
from services.cli.command_line.workloads import WorkloadOptions, requests_of
from services.cli.display.tables import aligned
from services.cli.supervision.private import with_private_deployment
from services.simulator.hardware import shape_of
from shared.config import Settings
from shared.errors import ConfigError
from shared.metrics import ModelWork, parse_slo, rate
from shared.workload import LoadRequest


def serve(options: ServeOptions, workload: WorkloadOptions, sampling: dict[str, Any]) -> int:
    """Run, print, save; returns the exit status: 1 where no request succeeded."""
    try:
        parse_slo(options.goodput)
        work_of(options)
    except (ValueError, ConfigError) as error:
        raise click.ClickException(str(error)) from error
    try:
        reports = uvloop.run(measure(options, workload, sampling))
    except grpc.RpcError as error:
        details = getattr(error, "details", error.__str__)()
        raise click.ClickException(f"{options.address}: {details}") from error
    if len(reports) > 1:
        click.echo(rates_table(reports))
    save(options, reports)
    if options.plot is not None:
        from services.cli.display.plots import plot_measured

        plot_measured(reports, options.plot)
    return 0 if all(report.completed for report in reports) else 1


def offline(settings: Settings, options: ServeOptions, workload: WorkloadOptions, sampling: dict[str, Any]) -> int:
    """The same with a private deployment, at an infinite rate where none is given; returns the exit status."""
    if not options.request_rates and workload.request_rate is None:
        workload = msgspec.structs.replace(workload, request_rate=math.inf)

    def work(private: Settings) -> int:
        return serve(msgspec.structs.replace(options, address=f"127.0.0.1:{private.gateway.port}"), workload, sampling)

    return with_private_deployment(settings, work)


def work_of(options: ServeOptions) -> ModelWork | None:
    """What the tokens of `mfu_model` cost; None where no MFU was asked for.  Raises ConfigError, ValueError."""
    if bool(options.mfu_model) != bool(options.peak_tflops):
        raise ValueError("--mfu-model and --peak-tflops must be given together")
    return shape_of(options.mfu_model).work() if options.mfu_model else None


async def measure(options: ServeOptions, workload: WorkloadOptions, sampling: dict[str, Any]) -> list[Report]:
    """One report for each rate.  Raises grpc.RpcError where the server does not answer."""
    given = {"temperature": 0.0, **sampling}
    if options.ignore_eos or workload.dataset_name != "custom":
        given["ignore_eos"] = True
    backend = backend_of(options, given)
    try:
        model = await backend.model(options.ready_check_timeout_sec)
        reports = []
        for load in loads(options, workload):
            requests = list(requests_of(load, model.vocab_size, max_model_len=model.max_model_len))
            reports.append(await run_once(backend, options, load, requests, model.name))
        return reports
    finally:
        await backend.close()


def backend_of(options: ServeOptions, sampling: dict[str, Any]) -> ServerBackend:
    """Raises click.ClickException where the HTTP client is not installed."""
    if options.backend == "pageant-grpc":
        return GrpcBackend(options.address, sampling)
    try:
        from services.cli.bench.http_backend import HttpBackend
    except ImportError as error:
        raise click.ClickException("HTTP needs a client: pip install 'pageant[bench]'") from error
    return HttpBackend(options.base_url, sampling)


def loads(options: ServeOptions, workload: WorkloadOptions) -> list[WorkloadOptions]:
    """The workload at each of the rates, with contents of its own, so that none finds the last one's cached."""
    if not options.request_rates:
        return [workload]
    return [
        msgspec.structs.replace(workload, request_rate=rate, seed=workload.seed + index)
        for index, rate in enumerate(options.request_rates)
    ]


async def run_once(
    backend: ServerBackend,
    options: ServeOptions,
    workload: WorkloadOptions,
    requests: Sequence[LoadRequest],
    model: str,
) -> Report:
    """Warm up, send all, sum up, print."""
    if not requests:
        raise click.ClickException("there are no requests to send")
    await warm_up(backend, requests[0], options.num_warmups)
    before = await backend.acceptance()
    with tqdm(total=len(requests), unit="req", disable=not sys.stderr.isatty()) as progress:
        outcomes = await Generator(backend, options.max_concurrency).send(requests, lambda _: progress.update())
    run = RunOptions(options, workload, model, work_of(options))
    report = report_of(run, outcomes, (await backend.acceptance()).since(before))
    click.echo(block(report))
    warn(outcomes)
    return report


async def warm_up(backend: ServerBackend, like: LoadRequest, count: int) -> None:
    """Send a request some times over before anything is measured."""
    if count:
        await Generator(backend).send([msgspec.structs.replace(like, time=0.0)] * count, lambda _: None)
        await asyncio.sleep(0.2)  # what the last one leaves behind


def warn(outcomes: Sequence[RequestOutcome]) -> None:
    """Say what the figures do not: failures by reason, and where this generator itself was the bottleneck."""
    num_late, worst = lateness(outcomes)
    if num_late:
        click.echo(
            f"the generator could not keep up: {num_late} of {len(outcomes)} requests left more than 10 ms late, "
            f"the worst {1000 * worst:.0f} ms; latencies count from when they were due",
            err=True,
        )
    reasons = Counter(outcome.error or "no output" for outcome in outcomes if not outcome.succeeded)
    for reason, count in reasons.most_common(5):
        click.echo(f"{count} failed: {reason}", err=True)


def rates_table(reports: Sequence[Report]) -> str:
    """One row per rate."""
    head = ("rate", "done", "failed", "req/s", "goodput", "out tok/s", "TTFT p50", "p90", "p99", "ITL p50", "p99",
            "TPOT p50", "E2EL p50")  # fmt: skip
    return aligned(head, [_row(report) for report in reports], left=())


def _row(report: Report) -> tuple[str, ...]:
    values, good = figures(report), rate(report.num_good, report.duration)
    ttft, itl, tpot, e2el = (report.summaries[name] for name in ("ttft", "itl", "tpot", "e2el"))
    times = (ttft.median, ttft.percentiles[90.0], ttft.percentiles[99.0], itl.median, itl.percentiles[99.0],
             tpot.median, e2el.median)  # fmt: skip
    return (
        f"{report.options.request_rate:g}", str(values["completed"]), str(values["failed"]),
        f"{values['request_throughput']:.2f}", f"{good:.2f}", f"{values['output_throughput']:.0f}",
        *(f"{1000 * time:.1f}" for time in times),
    )  # fmt: skip


def save(options: ServeOptions, reports: Sequence[Report]) -> None:
    """JSON: an object for each run; several go into one file as lines, as `append_result` does too."""
    if not (options.save_result or options.save_detailed):
        return
    results = [as_json(report, detailed=options.save_detailed) for report in reports]
    name = options.result_filename or f"{results[0]['backend']}-{results[0]['model_id']}-{results[0]['date']}.json"
    options.result_dir.mkdir(parents=True, exist_ok=True)
    path = options.result_dir / name
    text = "\n".join(msgspec.json.encode(result).decode() for result in results)
    with path.open("a" if options.append_result else "w", encoding="utf-8") as file:
        file.write(text + "\n")
    click.echo(f"saved: {path}", err=True)
