"""From log lines to a request's story: sources, clocks, causes, conditions."""

from __future__ import annotations

import contextlib
import gzip
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from services.cli.main import main
from services.cli.trace.logs import Logs, align, gather, parse, read
from services.cli.trace.requests import FIELDS
from services.cli.trace.where import WhereError, parse_where
from tests.unit.cli.trace.lines import PHASES, START, many, request, step

ID = "4be1" + "0" * 28
BAD = (
    "_0",
    "ttft>5 and _0",
    "ttft>5 and ()",
    "not(ttft>5)(ttft>6)",
    "ttft >",
    "> 5",
    "ttft 5",
    "(ttft>5",
    "ttft>5 queue>3",
    "ttft>5)",
    "__import__('os')",
    "ttft>5;",
    "(" * 99,
    "not",
)


def logs_of(*lines: str) -> Logs:
    return gather(entry for line in lines if (entry := parse(line)))


def run(*arguments: str, lines: list[str] | None = None) -> Any:
    return CliRunner().invoke(main, ["trace", *arguments], input="\n".join(lines or []))


def test_lines_come_from_files_folders_archives_and_compose(tmp_path: Path) -> None:
    lines = list(request(ID))
    (tmp_path / "gateway.log").write_text("\n".join(["not a line", "{broken", *lines[:3]]), encoding="utf-8")
    (tmp_path / "deeper").mkdir()
    with gzip.open(tmp_path / "deeper" / "worker.log.gz", "wt") as archive:
        archive.write("\n".join(f"worker-1  | {line}" for line in lines[3:]))
    assert len(list(read([str(tmp_path)]))) == len(lines)
    (trace,) = gather(read([str(tmp_path)])).traces
    assert [entry.event for entry in trace.entries][-1] == "request_finished"
    assert parse('{"event": "x", "service": "y", "instance": "z", "timestamp": 5}') is None
    assert parse('[{"event": 1}]') is None


def test_the_story_of_one_request() -> None:
    done = run(ID[:6], lines=list(request(ID, label="mine")))
    assert done.exit_code == 0
    text = done.output
    assert "612 ms of 840 queued: no free blocks, 14 requests ahead" in text
    assert "288 evicted (given away 5120 ms before), 12 below_block" in text
    for phase in PHASES:
        assert re.search(rf"^{phase} .*█|^{phase} .*[▏▎▍▌▋▊▉]", text, re.MULTILINE), phase
    assert text.index("queue_blocks") < text.index("prefill") < text.index("decode") < text.index("client_blocked")
    assert "request_tokenized" in text and "worker-1a2b" in text


def test_spans_cover_the_whole_time_without_a_gap() -> None:
    (trace,) = logs_of(*request(ID)).traces
    spans = trace.spans
    assert spans[0].start == 0 and spans[-1].end == pytest.approx(sum(PHASES.values()))
    for before, after in pairwise(spans):
        assert after.start == pytest.approx(before.end)
    first = next(index for index, span in enumerate(spans) if span.phase == "decode")
    assert {span.phase for span in spans[:first]} >= {"to_detokenizer", "to_gateway"}  # the first output's way back


def test_where_a_request_is_that_has_not_ended() -> None:
    done = run(ID, lines=list(request(ID, ended=False)))
    assert "being computed (sequence_admitted at worker-1a2b)" in done.output
    done = run(ID, lines=list(request(ID, ended=False))[:3])
    assert "waiting in the queue (request_queued at scheduler-1a2b)" in done.output


@pytest.mark.parametrize("name", [ID, ID[:5], ID[::-1], "mine"])
def test_a_request_is_found_by_its_id_its_trace_and_its_label(name: str) -> None:
    lines = [*many(5), *request(ID, label="mine")]
    assert "request 4be1" in run(name, lines=lines).output


def test_a_missing_request_or_log_ends_the_command() -> None:
    assert "no line is about a request 'zzz'" in run("zzz", lines=many(2)).output
    assert run("--logs", "/nowhere/at/all").exit_code == 1


def test_the_slowest_by_any_figure() -> None:
    lines = many(20)
    listed = run("--slowest", "3", lines=lines).output.splitlines()[2:]
    assert [row.split()[1] for row in listed] == ["r13", "r19", "r6"]
    by_queue = run("--slowest", "2", "--by", "queue", lines=lines).output.splitlines()[2:]
    assert {row.split()[1] for row in by_queue} == {"r6", "r13"}


CONDITIONS = {
    "ttft>500ms": True,
    "ttft > 0.5s and e2e < 1m": True,
    "ttft>643.5": False,
    "status=OK": True,
    "status != OK or label = mine": True,
    "not status=OK": False,
    "not (status=OK and label=other)": True,
    "cause ~ 'free blocks'": True,
    "queue_blocks >= 610ms": True,
    "queue<600": False,
    "evicted>0 and cached_tokens==512": True,
    "prefill > 30 or decode > 180ms and label='mine'": True,
    "nothing>5": False,
    "nothing!=5": True,
    "label>5": False,
    "label ~ MIN and cached_tokens ~ 51": True,
    "label = 'a and b' or ttft>500": True,
}


@pytest.mark.parametrize(("condition", "holds"), CONDITIONS.items())
def test_conditions(condition: str, holds: bool) -> None:
    (trace,) = logs_of(*request(ID, label="mine")).traces
    assert parse_where(condition, FIELDS | {"nothing"})(trace.values) is holds


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(WhereError):
        parse_where(text, FIELDS)
    done = run("--where", text, lines=many(1))
    assert done.exit_code == 1 and "--where" in done.output


def test_any_text_is_a_condition_or_refused() -> None:
    rng = random.Random(3)
    words = ["ttft", ">", "5ms", "and", "or", "not", "(", ")", "=", "'a'", "~", "x", "!", "-3", "{", "\\"]
    for _ in range(2000):
        with contextlib.suppress(WhereError):
            parse_where(" ".join(rng.choices(words, k=rng.randint(1, 9))), {"ttft", "x"})({"ttft": 4.0})


@pytest.mark.parametrize("option", ["--where", "--by"])
def test_a_field_that_no_request_can_have_is_an_error_that_names_those_that_there_are(option: str) -> None:
    value = "ttfft > 5ms" if option == "--where" else "ttfft"
    done = run(option, value, "--slowest", "1", lines=many(1))
    assert done.exit_code == 1 and option in done.output and "did you mean 'ttft'?" in done.output
    assert "queue_blocks" in done.output and "prompt_tokens" in done.output


@pytest.mark.parametrize(
    "clocks",
    [
        {"worker": 3.0},
        {"scheduler": -120.0, "worker": -120.0},
        {"gateway": 0.5},
        {"tokenizer": 4.0, "detokenizer": -9.0},
    ],
    ids=str,
)
def test_clocks_that_differ_are_moved_to_the_gateway_s(clocks: dict[str, float]) -> None:
    """After that no line comes before its cause, and no clock is off by more than a request took."""
    lines: list[str] = []
    for number in range(30):
        phases = {**PHASES, "queue_blocks": 5.0, "decode": 30.0}
        lines += request(f"{number:032x}", start=START + number, clocks=clocks, phases=phases)
    logs = logs_of(*lines)
    moved = align(logs)
    for service in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer"):
        ahead = clocks.get(service, 0.0) - clocks.get("gateway", 0.0)
        assert moved.get(f"{service}-1a2b", 0.0) == pytest.approx(-ahead, abs=0.1), service
    for trace in logs.traces:
        events = [entry.event for entry in trace.entries]
        assert events.index("request_received") < events.index("request_tokenized") < events.index("request_queued")
        assert events.index("sequence_admitted") < events.index("sequence_finished") < events.index("request_finished")
    assert align(logs) == {}


def test_clocks_that_agree_are_left_alone() -> None:
    assert align(logs_of(*many(10))) == {}


def test_steps_are_kept_apart_from_requests() -> None:
    logs = logs_of(*many(3), step(99, START, 10.0, [("a", 0, 1)]))
    assert len(logs.traces) == 3 and len(logs.steps()) == 7
