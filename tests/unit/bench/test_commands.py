"""The command lines: every option once, and `simulate` from its arguments to its table, its JSON and its figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.main import main

COMMANDS = (["bench"], ["bench", "serve"], ["bench", "offline"], ["bench", "messages"], ["bench", "kernels"],
            ["simulate"])  # fmt: skip
TRACE = [(0, 700, 20, [0, 1]), (50, 1000, 30, [0, 2]), (90, 1100, 10, [0, 2, 3]), (400, 300, 40, [4])] * 5


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == status, result.output + repr(result.exception)
    return result.output


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": 500 * (index // 4) + time, "input_length": length, "output_length": output,
                    "hash_ids": names})
        for index, (time, length, output, names) in enumerate(TRACE)
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_tells_its_options(command: list[str]) -> None:
    assert "Usage" in run(*command, "--help")


def test_a_simulation_says_what_to_run_and_the_same_again(trace: Path, tmp_path: Path) -> None:
    arguments = ["simulate", "--workers", "1,2", "--routing-policy", "round_robin,prefix_aware", "--dataset-name",
                 "trace", "--dataset-path", str(trace), "--goodput", "ttft:2000", "--attainment", "0.9",
                 "--cost-per-worker", "3.5"]  # fmt: skip
    text = run(*arguments, "--json", str(tmp_path / "a.json"))
    assert "met by 90 % of requests, the cheapest first" in text and "\n 3.5" in text
    run(*arguments, "--json", str(tmp_path / "b.json"))
    first, second = (json.loads((tmp_path / name).read_text())["results"] for name in ("a.json", "b.json"))
    assert first == second and len(first) == 4
    assert all(result["completed"] == 20 and result["hit_rate"] > 0.3 for result in first)
    assert {result["configuration"]["routing_policy"] for result in first} == {"round_robin", "prefix_aware"}


def test_a_simulation_is_plotted(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    run("simulate", "--workers", "1,2", "--dataset-name", "trace", "--dataset-path", str(trace), "--plot",
        str(tmp_path / "p.png"))  # fmt: skip
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_load_that_grows_with_the_workers(trace: Path, tmp_path: Path) -> None:
    run("simulate", "--workers", "1,4", "--load-per-worker", "--dataset-name", "trace", "--dataset-path", str(trace),
        "--json", str(tmp_path / "a.json"))  # fmt: skip
    one, four = json.loads((tmp_path / "a.json").read_text())["results"]
    assert four["request_throughput"] > 2 * one["request_throughput"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--goodput", "itl:5"], "itl:5"),
        (["--device", "abacus"], "abacus"),
        (["--model", "nowhere"], "nowhere"),
        (["--device", "l4", "--model", "llama-3-70b"], "no room"),
        (["--dataset-name", "trace"], "--dataset-path"),
        (["--workers", "0"], "whole numbers"),
        (["--routing-policy", "by_name"], "by_name"),
        (["--request-rate", "-1"], "positive"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["simulate", *arguments])
    assert result.exit_code != 0 and said in result.output, result.output


def test_serve_says_that_nothing_answers() -> None:
    text = run("bench", "serve", "--address", "127.0.0.1:1", "--ready-check-timeout-sec", "0.2", status=1)
    assert "127.0.0.1:1" in text
