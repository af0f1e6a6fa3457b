"""The block and the JSON of `bench serve`: figures by hand, under the keys that scripts read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from services.cli.bench.generator import RequestOutcome
from services.cli.bench.options import ServeOptions
from services.cli.bench.report import RunOptions, as_json, block, figures, report_of
from services.cli.bench.serve import loads, rates_table, save, work_of
from services.cli.command_line.workloads import WorkloadOptions, requests_of
from shared.errors import ConfigError
from shared.metrics import Acceptance, ModelWork, Timeline

KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx", *(f"{part}_{name}_ms" for part in ("mean", "median", "std", "p99")
                                         for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts",
           "errors"}  # fmt: skip
SPECULATION = {f"spec_decode_{name}" for name in ("acceptance_rate", "acceptance_length", "num_drafts", "draft_tokens",
                                                  "accepted_tokens", "per_position_acceptance_rates")}  # fmt: skip


def outcome(start: float, *times: float, sent: float | None = None, prompt: int = 10) -> RequestOutcome:
    line = Timeline(start, list(times), [1] * len(times))
    end = times[-1] if times else start
    return RequestOutcome(
        line, start if sent is None else sent, 0.0, end, prompt, 4, "text", "" if times else "NOT_FOUND: no"
    )


HOW = ServeOptions(goodput=("ttft:250",), percentile_metrics=("ttft", "tpot", "itl", "e2el"))
OPTIONS = RunOptions(HOW, WorkloadOptions(request_rate=2.0), "m")
OUTCOMES = [outcome(0.0, 0.2, 0.4, 0.6), outcome(0.5, 1.0, 1.1), outcome(1.0)]


def test_counts_and_rates() -> None:
    values = figures(report_of(OPTIONS, OUTCOMES, Acceptance()))
    assert values["duration"] == 1.1
    assert (values["completed"], values["failed"]) == (2, 1)
    assert (values["total_input_tokens"], values["total_output_tokens"], values["total_cached_tokens"]) == (20, 5, 8)
    assert values["request_throughput"] == pytest.approx(2 / 1.1)
    assert values["request_goodput"] == pytest.approx(1 / 1.1), "one first token came after 500 ms"
    assert values["output_throughput"] == pytest.approx(5 / 1.1)
    assert values["total_token_throughput"] == pytest.approx(25 / 1.1)
    assert values["max_output_tokens_per_s"] == 3 and values["max_concurrent_requests"] == 2


def test_queries_per_minute_and_of_serial_use() -> None:
    values = figures(report_of(OPTIONS, OUTCOMES, Acceptance()))
    assert values["queries_per_minute"] == pytest.approx(60 * 2 / 1.1)
    assert values["serial_queries_per_second"] == pytest.approx(2 / (0.6 + 0.6))
    lines = block(report_of(OPTIONS, OUTCOMES, Acceptance())).splitlines()
    assert "Queries per minute (QPM):                109.09" in lines
    assert "Queries per second, serial (QPS):        1.67" in lines


def test_time_between_tokens_has_a_gap_for_each_token() -> None:
    line = Timeline(0.0, [0.2, 0.5], [1, 3])
    options = RunOptions(ServeOptions(percentile_metrics=("tbt",)), OPTIONS.load, "m")
    report = report_of(options, [RequestOutcome(line, end=0.5)], Acceptance())
    assert report.summaries["itl"].mean == pytest.approx(0.3)
    assert report.summaries["tbt"].mean == pytest.approx(0.1), "one gap of 0.3 s and two of 0"
    assert "Mean TBT (ms):                           100.00" in block(report).splitlines()


def test_mfu_counts_each_token_that_was_computed_once() -> None:
    """10 prompt tokens of which 4 are cached, and 3 sampled: 8 tokens are computed, which meet 5 + ... + 12 keys."""
    work = ModelWork(num_matrix_params=100, num_head_params=10, num_query_features=2, kv_bytes_per_token=4)
    options = RunOptions(msgspec.structs.replace(HOW, peak_tflops=1e-7), OPTIONS.load, "m", work)
    report = report_of(options, [outcome(0.0, 0.2, 0.4, 0.5)], Acceptance())
    done = 2 * (100 * 8 + 10 * 3) + 4 * 2 * sum(range(5, 13))
    assert figures(report)["mfu"] == pytest.approx(done / (0.5 * 1e5))
    assert f"Model FLOPs utilization (%):             {100 * done / 5e4:.2f}" in block(report).splitlines()
    without = report_of(OPTIONS, [outcome(0.0, 0.2)], Acceptance())
    assert math.isnan(figures(without)["mfu"]) and "FLOPs" not in block(without)


def test_mfu_needs_a_model_and_a_peak() -> None:
    assert work_of(SERVE) is None
    with pytest.raises(ValueError, match="--mfu-model and --peak-tflops"):
        work_of(msgspec.structs.replace(SERVE, peak_tflops=1.0))
    with pytest.raises(ConfigError, match="neither one of"):
        work_of(msgspec.structs.replace(SERVE, mfu_model="no-such", peak_tflops=1.0))


def test_latencies_count_from_the_intended_time() -> None:
    late = report_of(OPTIONS, [outcome(0.0, 1.5, 1.6, sent=1.0)], Acceptance())
    assert late.summaries["ttft"].mean == 1.5 and late.summaries["e2el"].mean == 1.6
    details = as_json(late, detailed=True)
    assert details["queue_times"] == [1.0] and details["start_times"] == [1.0] and details["intended_times"] == [0.0]


def test_the_json_has_the_keys_that_scripts_read() -> None:
    report = report_of(OPTIONS, OUTCOMES, Acceptance(10, 40, 22, [9, 8, 5]))
    plain, detailed = as_json(report, detailed=False), as_json(report, detailed=True)
    assert plain.keys() >= KEYS | SPECULATION and not plain.keys() & DETAILS
    assert detailed.keys() >= KEYS | DETAILS
    assert plain["median_ttft_ms"] == pytest.approx(350) and plain["p99_ttft_ms"] == pytest.approx(497)
    assert plain["mean_itl_ms"] == pytest.approx(500 / 3) and plain["mean_tpot_ms"] == pytest.approx(150)
    assert detailed["ttfts"] == pytest.approx([0.2, 0.5, 0.0]) and detailed["errors"][2] == "NOT_FOUND: no"
    assert detailed["itls"][0] == pytest.approx([0.2, 0.2])
    assert plain["spec_decode_acceptance_rate"] == pytest.approx(55)
    assert json.loads(msgspec.json.encode(detailed))["completed"] == 2
    assert as_json(report_of(RunOptions(HOW, WorkloadOptions(), "m"), OUTCOMES, Acceptance()),
                   detailed=False)["request_rate"] == "inf"  # fmt: skip


def test_the_block() -> None:
    lines = block(report_of(OPTIONS, OUTCOMES, Acceptance(10, 40, 22, [9, 8, 5]))).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    assert "Successful requests:                     2" in lines
    assert "Request rate configured (RPS):           2.00" in lines
    assert "Mean TTFT (ms):                          350.00" in lines
    assert "P99 TTFT (ms):                           497.00" in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "Acceptance rate (%):                     55.00" in lines
    plain = block(report_of(OPTIONS, OUTCOMES, Acceptance()))
    assert "Acceptance" not in plain


WORKLOAD = WorkloadOptions(num_prompts=6, random_input_len=8, random_output_len=4, custom_output_len=8, seed=3)
SERVE = ServeOptions(num_warmups=0, percentile_metrics=["ttft"], save_result=True, result_filename="r.json")


def test_a_workload_is_made_of_its_options(tmp_path: Path) -> None:
    at_once = list(requests_of(WORKLOAD, 1000))
    assert len(at_once) == 6 and {request.time for request in at_once} == {0.0}
    paced = list(requests_of(msgspec.structs.replace(WORKLOAD, request_rate=2.0), 1000))
    assert paced[-1].time == pytest.approx(3.0)
    assert [request.prompt for request in paced] == [request.prompt for request in at_once], "the seed decides"
    ramp = msgspec.structs.replace(WORKLOAD, ramp_up_strategy="linear", burstiness=math.inf)
    times = [request.time for request in requests_of(ramp, 1000)]
    assert times[1] - times[0] > times[-1] - times[-2]
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]}\n' * 3)
    trace = msgspec.structs.replace(WORKLOAD, dataset_name="trace", dataset_path=path, num_prompts=0)
    cut = list(requests_of(trace, 1000, max_model_len=128))
    assert [(request.num_prompt_tokens, request.max_tokens) for request in cut] == [(78, 50)] * 3


def test_each_rate_has_contents_of_its_own() -> None:
    rates = loads(msgspec.structs.replace(SERVE, request_rates=[1.0, 2.0]), WORKLOAD)
    assert [load.request_rate for load in rates] == [1.0, 2.0]
    first, second = (list(requests_of(load, 1000)) for load in rates)
    assert first[0].prompt != second[0].prompt
    assert loads(SERVE, WORKLOAD) == [WORKLOAD]


def test_results_are_saved_and_appended(tmp_path: Path) -> None:
    report = report_of(OPTIONS, OUTCOMES, Acceptance())
    options = msgspec.structs.replace(SERVE, result_dir=tmp_path / "deep")
    save(options, [report])
    save(msgspec.structs.replace(options, append_result=True), [report, report])
    lines = (tmp_path / "deep" / "r.json").read_text().splitlines()
    assert len(lines) == 3 and all(json.loads(line)["completed"] == 2 for line in lines)
    assert len(rates_table([report, report]).splitlines()) == 4


def test_plots_are_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from services.cli.display.plots import plot_measured

    reports = [report_of(RunOptions(HOW, WorkloadOptions(request_rate=rate), "m"), OUTCOMES, Acceptance())
               for rate in (1.0, 2.0, math.inf)]  # fmt: skip
    plot_measured(reports, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
