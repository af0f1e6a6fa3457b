"""A bench of two checkouts at once: turns, what their tables say of each other, and what cannot be compared."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from scripts.bench import against
from scripts.bench.against import BenchFailed, Figure, better, ratios, read_table, run_in_slices
from scripts.bench.common.report import Result, table

TABLE = table(
    [
        Result("tokens per second, 64 streams", 12_770, "/s", at_least=20_000),
        Result("gateway: processor time per token", 55.5, "us", note="71% of a core"),
        Result("memory grown", 0, "MiB", at_most=8),
        Result("not measured", None, "us"),
    ],
    title="64 streams, steps of 25 ms",
)


def checkout(directory: Path, program: str) -> Path:
    scripts = directory / "scripts"
    scripts.mkdir(parents=True)
    (directory / ".venv" / "bin").mkdir(parents=True)
    (directory / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (scripts / "bench_it").write_text(f"#!{sys.executable}\nimport sys, time\n{program}\n")
    (scripts / "bench_it").chmod(0o755)
    return directory


def printing(lines: list[Result]) -> str:
    return f"print({table(lines)!r})"


def test_the_last_table_is_read() -> None:
    before = table([Result("tokens per second, 64 streams", 1.0, "/s")])
    assert read_table(f"{before}\nwords   12 of 30\n\n{TABLE}\n") == {
        "tokens per second, 64 streams": Figure(12_770, "/s"),
        "gateway: processor time per token": Figure(55.5, "us"),
        "memory grown": Figure(0, "MiB"),
    }
    assert read_table("no table   12 us") == {}


def test_more_of_a_rate_is_better_and_less_of_anything_else() -> None:
    assert better(Figure(3.0, "tokens/s"), Figure(2.0, "tokens/s")) == 1.5
    assert better(Figure(3.0, "us"), Figure(1.5, "us")) == 0.5
    assert better(Figure(0.0, "us"), Figure(1.5, "us")) is None
    assert better(Figure(1.0, "MiB"), Figure(-3.0, "MiB")) is None


def test_ratios_are_those_of_each_round() -> None:
    here, there = Path("here"), Path("there")
    rounds = [
        {here: {"a": Figure(own, "us"), "b": Figure(1, "/s")}, there: {"a": Figure(other, "us"), "c": Figure(1, "/s")}}
        for own, other in ((10.0, 9.0), (20.0, 20.0), (40.0, 44.0))
    ]
    missing, only = ratios(rounds, [here, there], ["a", "b"])
    assert only == Result("a", 1.0, "x", at_least=0.97, note="20.0 against 20.0 us") and not only.missed
    assert (missing.what, missing.missed) == ("b", True)
    (only,) = ratios(rounds[:1], [here, there], ["a"])
    assert only.measured == 0.9 and only.missed
    (only,) = ratios(rounds[:1], [here, there], [])
    assert not only.missed


def test_one_runs_while_the_other_is_stopped(tmp_path: Path) -> None:
    program = """
seen = []
end = time.monotonic() + 2.5
while time.monotonic() < end:
    seen.append(time.monotonic())
    time.sleep(0.005)
gaps = [second - first for first, second in zip(seen, seen[1:])]
print("what  measured  target  verdict")
print("awake  %.3f s" % sum(gap for gap in gaps if gap <= 0.1))
"""
    one, two = checkout(tmp_path / "one", program), checkout(tmp_path / "two", program)
    awake = [figures["awake"].value for figures in run_in_slices([(one, ["bench_it"]), (two, ["bench_it"])])]
    assert max(awake) < 2.0, "neither ran all the time"
    assert min(awake) > 0.3, "each had turns"


def test_a_bench_without_a_table_is_named_and_the_other_one_ends(tmp_path: Path) -> None:
    bad = checkout(tmp_path / "bad", "sys.exit('no such option')")
    slow = checkout(tmp_path / "slow", "time.sleep(0.6); print('what  measured  target  verdict\\nx  1 us')")
    with pytest.raises(BenchFailed, match=r"bad printed no table: no such option"):
        run_in_slices([(bad, ["bench_it"]), (slow, ["bench_it"])], slice_seconds=0.05)


def test_what_still_runs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = checkout(
        tmp_path / "lasting",
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid())); time.sleep(60)",
    )

    def interrupted(*_: object) -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)
        raise KeyboardInterrupt

    monkeypatch.setattr(against, "_slice", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_slices([(lasting, ["bench_it"])])
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(("slower", "status"), [(1.0, 0), (1.2, 1)])
def test_the_command_checks_the_figures_that_are_named(
    slower: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = checkout(tmp_path / "here", printing([Result("a step", 100 * slower, "us"), Result("a stop", 9.0, "us")]))
    there = checkout(tmp_path / "there", printing([Result("a step", 100.0, "us"), Result("a stop", 1.0, "us")]))
    monkeypatch.setattr(against, "HERE", here)
    monkeypatch.setattr(
        sys, "argv", ["x", str(there), "--rounds", "1", "--check", "--figures", "step", "--", "bench_it"]
    )
    assert against.main() == status
    out = capsys.readouterr().out
    assert "a stop" in out and ("missed" in out) == bool(status)


def test_a_checkout_that_cannot_run_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "--", "bench_streams"])
    with pytest.raises(SystemExit):
        against.main()
    assert "scripts/bench_streams is not there" in capsys.readouterr().err
