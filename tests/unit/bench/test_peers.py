"""scripts/bench_peers: what is asked of the engines, how they take turns, and what is made of their times."""

from __future__ import annotations

import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from scripts.bench.common.proc import tree
from scripts.bench.common.specs import FAMILIES, SPECS
from scripts.bench.common.turns import rotated
from scripts.bench.peers import figures, rounds
from scripts.bench.peers.catalog import (
    CHAIN,
    CHAIN_OTHER,
    FULL,
    INT4,
    INT8,
    RUNNER,
    RUNNER_INT8,
    RUNNER_OTHER,
    PeerEngine,
    engines,
)
from scripts.bench.peers.child import EngineFailed, EngineProcess
from scripts.bench.peers.conversion import ConversionFailed, convert_missing
from scripts.bench.peers.figures import (
    best_peer,
    engine_table,
    floor_line,
    memory_line,
    pair_lines,
    ratio_lines,
    target,
)
from scripts.bench.peers.main import arguments
from scripts.bench.peers.rounds import EngineRecord, EngineRun, PeerContest, paired_ratio
from scripts.bench.peers.workloads import WORKLOADS
from shared.processes.proc import stat

VOCAB = 32_000
FAKE = """
import os, time

class Fake:
    version = "fake 1"

    def __init__(self, options):
        print("engines may print what they like")
        self.options = options

    def prepare(self, num_seqs, num_tokens):
        self.shape = [num_seqs, num_tokens]

    def use_adapters(self, count):
        self.shape = ["adapters", count]

    def run(self, requests):
        os.write(1, b"even so\\n")
        time.sleep(self.options["seconds"])
        return {"num_tokens": [count - self.options["short"] for _, count in requests], "first": 0.001}

    def report(self):
        return {"shape": self.shape}

    def close(self):
        pass

load = Fake
"""

BUSY = """
import time

class Busy:
    version = "busy 1"

    def __init__(self, options):
        self.runs = options["runs"]

    def run(self, requests):
        assert self.runs, "no more runs"
        self.runs -= 1
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        return {"num_tokens": [count for _, count in requests]}

load = Busy
"""


@pytest.fixture
def fake(tmp_path: Path) -> PeerEngine:
    """An engine whose name is that of a package, which must not matter."""
    file = tmp_path / "json.py"
    file.write_text(textwrap.dedent(FAKE))
    options = {"seconds": 0.0, "short": 0, "num_threads": 2}
    return PeerEngine("fake", FULL, file, Path(sys.executable), options)


def record(name: str, *seconds: float, others: float = 0.0, first: float = 0.0) -> EngineRecord:
    return EngineRecord(WORKLOADS[name], [EngineRun(each, first, others) for each in seconds])


# -- workloads


@pytest.mark.parametrize(
    ("name", "num_requests", "num_prompt", "num_output"),
    [("a", 1, 32, 128), ("b1", 32, 4096, 4096), ("b2", 64, 15_482, 8_011), ("c", 1, 2048, 1), ("d", 32, 33_792, 512)],
)
def test_every_round_has_the_same_lengths_and_other_ids(
    name: str, num_requests: int, num_prompt: int, num_output: int
) -> None:
    first, second = (WORKLOADS[name].requests(number, VOCAB) for number in (0, 1))
    assert len(first) == num_requests
    assert sum(len(prompt) for prompt, _ in first) == num_prompt
    assert sum(count for _, count in first) == num_output
    assert [(len(prompt), count) for prompt, count in first] == [(len(prompt), count) for prompt, count in second]
    assert all(one[0][:16] != other[0][:16] for one, other in zip(first, second, strict=True))
    assert first == WORKLOADS[name].requests(0, VOCAB)
    assert all(100 <= token < 15_000 for prompt, _ in first for token in prompt)


def test_only_d_shares_a_prefix_and_only_within_a_round() -> None:
    prompts = [tuple(prompt) for prompt, _ in WORKLOADS["d"].requests(0, VOCAB)]
    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert len({prompt[1024:] for prompt in prompts}) == 32
    assert len({tuple(prompt[:16]) for prompt, _ in WORKLOADS["b1"].requests(0, VOCAB)}) == 32


def test_a_small_vocabulary_is_kept_to() -> None:
    assert all(token < 300 for prompt, _ in WORKLOADS["c"].requests(0, 300) for token in prompt)


def test_speeds() -> None:
    assert WORKLOADS["a"].speed(2.0) == 64
    assert WORKLOADS["b1"].speed(4.0) == 1024
    assert WORKLOADS["c"].speed(0.5) == 4096
    assert WORKLOADS["d"].speed(4.0) == 0.25
    assert WORKLOADS["d"].told(0.25) == 4.0
    assert WORKLOADS["a"].told(64.0) == 64.0


# -- figures


@pytest.fixture(autouse=True)
def without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets follow the processor."""
    monkeypatch.setattr(figures, "has_bf16", lambda: False)


def test_a_ratio_is_of_medians_against_the_fastest_peer() -> None:
    records = {
        ("a", RUNNER): record("a", 1.0, 1.5, 9.0),
        ("a", "slow"): record("a", 4.0),
        ("a", "fast"): record("a", 2.0, 3.0, 3.3),
        ("a", CHAIN): record("a", 3.3),
    }
    runner, chain = ratio_lines(records, "S", FULL)
    assert best_peer(records, "a") == ("fast", records["a", "fast"])
    assert runner.measured == pytest.approx(2.0) and not runner.missed
    assert chain.measured == pytest.approx(3.0 / 3.3) and chain.missed


def test_seconds_are_better_when_fewer() -> None:
    records = {("d", RUNNER): record("d", 1.0), ("d", "peer"): record("d", 2.0), ("d", CHAIN): record("d", 4.0)}
    assert [line.measured for line in ratio_lines(records, "S", FULL)] == [2.0, 0.5]
    assert [line.missed for line in ratio_lines(records, "S", FULL)] == [False, True]


def test_int4_is_compared_with_our_int8_too_which_is_no_peer() -> None:
    records = {
        ("b1", RUNNER): record("b1", 1.0),
        ("b1", RUNNER_INT8): record("b1", 0.9),
        ("b1", "p"): record("b1", 2.0),
    }
    peer, chain, wider = ratio_lines(records, "S", INT4)
    assert (peer.measured, chain.measured) == (2.0, None)
    assert wider.measured == pytest.approx(0.9) and wider.missed


def test_another_checkout_is_no_peer_and_has_lines_of_its_own(tmp_path: Path) -> None:
    records = {
        ("c", RUNNER): record("c", 1.0),
        ("c", RUNNER_OTHER): record("c", 0.9),
        ("d", RUNNER): record("d", 1.0),
        ("d", RUNNER_OTHER): record("d", 1.01),
        ("d", CHAIN): record("d", 1.0),
        ("d", CHAIN_OTHER): record("d", 0.5),
    }
    prompt, shared = pair_lines(records, "S", {RUNNER}, ["c", "d"])
    absent, chain = pair_lines(records, "S", {CHAIN}, ["c", "d"])
    assert best_peer(records, "c") is None
    assert prompt.measured == pytest.approx(0.9) and prompt.missed
    assert shared.measured == pytest.approx(1.01) and not shared.missed
    assert chain.measured == pytest.approx(0.5) and chain.missed
    assert absent.measured is None and absent.missed
    assert {RUNNER_OTHER, CHAIN_OTHER}.isdisjoint(engine.name for engine in engines(tmp_path, "S", FULL))
    others = [engine for engine in engines(tmp_path, "S", FULL, tmp_path) if engine.name in (RUNNER_OTHER, CHAIN_OTHER)]
    folder = tmp_path / "scripts" / "bench" / "peers" / "engines"
    assert [one.missing for one in others] == [[folder / "pageant_runner.py"], [folder / "pageant_chain.py"]]


def test_two_checkouts_are_compared_round_by_round() -> None:
    own, other = record("c", 1.0, 2.0, 4.0), record("c", 1.1, 2.2, 4.4)
    assert paired_ratio(own, other) == pytest.approx(1.1)
    own.runs.append(EngineRun(9.0, 0.0, other_cores=0.5))
    other.runs.append(EngineRun(1.0, 0.0, other_cores=0.0))
    assert paired_ratio(own, other) == pytest.approx(1.1)  # a round with one noisy run does not count
    assert paired_ratio(record("c", 2.0, others=0.5), record("c", 1.0)) == 0.5  # unless there is no other


def test_quiet_runs_count_where_there_are_any() -> None:
    found = record("a", 1.0, 1.2)
    found.runs.append(EngineRun(9.0, 0.0, other_cores=0.5))
    assert found.seconds == pytest.approx(1.1) and found.spread == pytest.approx(0.2) and not found.is_noisy
    assert (found.num_quiet, record("a", 1.0, others=0.5).is_noisy) == (2, True)


def test_an_engine_of_ours_has_the_code_of_its_checkout(tmp_path: Path) -> None:
    (tmp_path / "which_checkout.py").write_text("NAME = 'the other one'")
    file = tmp_path / "engine.py"
    file.write_text(
        "import which_checkout\nclass Engine:\n    version = which_checkout.NAME\nload = lambda options: Engine()\n"
    )
    process = EngineProcess(PeerEngine(RUNNER_OTHER, FULL, file, Path(sys.executable), {}, root=tmp_path), tmp_path)
    process.close()
    assert process.version == "the other one"


def test_where_warm_ups_left_no_peer_they_are_compared() -> None:
    records = {("d", RUNNER): record("d", 1.0), ("d", CHAIN): record("d", 1.1)}
    warm_ups = {("d", RUNNER): 0.5, ("d", CHAIN): 2.5, ("d", "far"): 3.0, ("d", "near"): 2.1, ("c", "c alone"): 0.1}
    runner, chain = ratio_lines(records, "S", FULL, warm_ups)
    assert runner.measured == pytest.approx(4.2) and not runner.missed and "near" in runner.note
    assert chain.measured == pytest.approx(0.84) and chain.missed


def test_a_figure_that_is_absent_misses_its_target() -> None:
    alone = ratio_lines({("c", RUNNER): record("c", 1.0)}, "M", FULL)
    assert [(line.measured, line.missed) for line in alone] == [(None, True), (None, True)]


def targets(engine: str, model: str, quantization: str, bf16: bool = False) -> list[float | None]:
    return [target(engine, model, quantization, name, bf16) for name in WORKLOADS]


def test_targets() -> None:
    assert targets(RUNNER, "S", FULL) == [1.5, 1.4, 1.4, 1.1, 1.3]
    assert targets(RUNNER, "M", FULL) == [1.0, 1.25, 1.25, 1.1, 1.1]
    assert {*targets(CHAIN, "S", FULL), *targets(CHAIN, "M", FULL)} == {1.0}
    assert target(RUNNER, "S", INT8, "b1", False) == 1.1
    assert targets(RUNNER, "M", INT4) == [1.5, 1.6, None, 1.05, None]
    assert targets(CHAIN, "M", INT4) == [1.2, 1.4, None, 1.0, None]
    assert target(RUNNER, "M", INT8, "b1", False) is None and target("openvino-fp16", "S", FULL, "a", False) is None


def test_targets_where_the_processor_multiplies_bfloat16() -> None:
    assert targets(RUNNER, "S", FULL, True) == [None, 1.4, 1.4, 1.1, 1.3]
    assert targets(CHAIN, "M", FULL, True) == [1.0, 1.25, 1.25, 1.05, 1.2]
    assert targets(RUNNER, "M", INT8, True) == [1.5, 1.8, 1.6, 1.2, 1.5]
    assert targets(CHAIN, "moe", FULL, True) == [1.0, 1.0, None, 1.0, None]


def test_mixtures_have_targets_for_three_workloads_and_other_kinds_for_all() -> None:
    for model in FAMILIES["moe"]:
        assert targets(RUNNER, model, FULL) == [1.2, 1.2, None, 1.2, None]
        assert targets(CHAIN, model, FULL) == [1.0, 1.0, None, 1.0, None]
    for model in (*FAMILIES["gpt2"], *FAMILIES["gemma"]):
        for engine in (RUNNER, CHAIN):
            assert targets(engine, model, FULL) == [1.0] * 5
    assert {model for models in FAMILIES.values() for model in models} == set(SPECS)


def test_a_figure_without_a_target_is_told_and_not_missed() -> None:
    records = {("b2", RUNNER): record("b2", 2.0), ("b2", "peer"): record("b2", 1.0)}
    runner, chain = ratio_lines(records, "moe", FULL)
    assert runner.measured == pytest.approx(0.5) and not runner.missed and not chain.missed
    slow = {("a", RUNNER): record("a", 1.37, first=0.1)}
    line = floor_line(slow, "moe", FULL, streamed=1_000_000, bandwidth=10e9)
    assert line.measured == pytest.approx(0.01) and not line.missed


def test_decoding_against_the_memory_floor() -> None:
    records = {("a", RUNNER): record("a", 1.37, first=0.1)}  # 127 steps of 10 ms
    line = floor_line(records, "S", FULL, streamed=90_000_000, bandwidth=10e9)
    assert line.measured == pytest.approx(0.9) and not line.missed
    assert floor_line(records, "S", INT4, streamed=84_000_000, bandwidth=10e9).missed
    assert floor_line({}, "S", FULL, streamed=1, bandwidth=1.0).missed


def test_peak_memory() -> None:
    assert memory_line(RUNNER, "S", 115, 60, 40).measured == pytest.approx(1.15)
    assert memory_line(RUNNER, "S", 120, 60, 40).missed


def test_tables_show_every_engine_and_mark_noise() -> None:
    records = {("a", RUNNER): record("a", 1.0, 1.1, others=0.3), ("a", "peer"): record("a", 2.0)}
    versions = {RUNNER: "1", "peer": "2"}
    text = engine_table(records, versions, "title")
    assert "~122 (10 % of 2)" in text and "64.0 (0 % of 1)" in text


# -- turns


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does."""
    monkeypatch.setattr(rounds, "NOISE", math.inf)


@pytest.mark.usefixtures("quiet")
def test_each_round_begins_with_another_engine(fake: PeerEngine, tmp_path: Path) -> None:
    fake = replace(fake, options=fake.options | {"seconds": 0.1})  # far more than starting and answering vary
    children = [EngineProcess(replace(fake, name=name), tmp_path) for name in ("x", "y", "z")]
    contest = PeerContest(list(children), VOCAB, timeout=20)
    contest.play(WORKLOADS["c"], 2)
    assert {key: len(found.runs) for key, found in contest.records.items()} == {("c", n): 2 for n in "xyz"}
    assert [child.engine.name for child in rotated(children, 4)] == ["y", "z", "x"]
    with children[0].awake():
        assert children[0].report() == {"shape": [1, 2049]}
    for child in children:
        child.close()


def test_a_noisy_round_is_played_again_once(fake: PeerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = iter([0.5, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5])

    @contextmanager
    def told(_: object) -> Iterator[list[float]]:
        yield [next(cores)]

    monkeypatch.setattr(rounds, "others", told)
    contest = PeerContest([EngineProcess(fake, tmp_path)], VOCAB, timeout=20)
    for name, num_runs in (("a", 3), ("c", 4)):  # one of two was noisy; all are, and two more do not help
        contest.play(WORKLOADS[name], 2)
        assert len(contest.records[name, "fake"].runs) == num_runs
    assert not contest.records["a", "fake"].is_noisy and contest.records["c", "fake"].is_noisy
    contest.children[0].close()


@pytest.mark.usefixtures("quiet")
def test_an_engine_far_behind_sits_out_and_one_that_fails_is_gone(fake: PeerEngine, tmp_path: Path) -> None:
    options: dict[str, dict[str, float]] = {
        "quick": {},
        "slow": {"seconds": 1.0},
        "short": {"short": 1},
        "late": {"seconds": 60.0},
        "unwilling": {},
    }
    engines = [replace(fake, name=name, options=fake.options | more) for name, more in options.items()]
    engines[-1] = replace(engines[-1], avoids=frozenset("a"))
    contest = PeerContest([EngineProcess(engine, tmp_path) for engine in engines], VOCAB, timeout=3)
    contest.play(WORKLOADS["a"], 3)
    assert {engine: len(found.runs) for (_, engine), found in contest.records.items()} == {"quick": 3}
    assert [remark.split()[0].rstrip(":") for remark in contest.remarks] == ["short", "late", "unwilling", "slow"]
    assert [child.engine.name for child in contest.children] == ["quick", "slow", "unwilling"]
    for child in contest.children:
        child.close()


@pytest.fixture
def pair(fake: PeerEngine, tmp_path: Path) -> Iterator[list[EngineProcess]]:
    """Two versions that compute for 0.3 s, of which the second fails when it runs for the third time."""
    (root := tmp_path / "checkout").mkdir()
    (file := root / "busy.py").write_text(textwrap.dedent(BUSY))
    children = [
        EngineProcess(replace(fake, name=name, file=file, root=root, options={"runs": runs}), tmp_path)
        for name, runs in ((RUNNER, 9), (RUNNER_OTHER, 2))
    ]
    yield children
    for child in children:
        child.close()


@pytest.mark.usefixtures("quiet")
def test_two_versions_run_in_slices_and_count_the_time_awake(pair: list[EngineProcess]) -> None:
    contest = PeerContest(list(pair), VOCAB, timeout=20)
    begin = time.monotonic()
    contest.play_pairs(WORKLOADS["a"], 1)
    seconds = time.monotonic() - begin
    assert seconds > 1.1  # as one after the other: a warm-up and a run of both
    runs = [run.seconds for name in (RUNNER, RUNNER_OTHER) for run in contest.records["a", name].runs]
    assert len(runs) == 2 and min(runs) > 0.29
    assert sum(runs) < seconds - 2 * 0.29  # less the warm-ups: however slow the machine is, each has its own time only
    assert pair[0].run([([1], 1)], 20)["num_tokens"] == [1]  # it is not left stopped


@pytest.mark.usefixtures("quiet")
def test_a_version_that_fails_ends_the_pair(pair: list[EngineProcess]) -> None:
    contest = PeerContest(list(pair), VOCAB, timeout=20)
    contest.play_pairs(WORKLOADS["a"], 3)
    assert len(contest.remarks) == 1 and "no more runs" in contest.remarks[0]
    assert {name: len(found.runs) for (_, name), found in contest.records.items()} == {RUNNER: 2, RUNNER_OTHER: 1}
    assert [child.engine.name for child in contest.children] == [RUNNER]


@pytest.mark.usefixtures("quiet")
def test_peers_may_run_in_slices_too_and_rest_again(
    fake: PeerEngine, pair: list[EngineProcess], tmp_path: Path
) -> None:
    peer = EngineProcess(fake, tmp_path)
    contest = PeerContest([pair[0], peer], VOCAB, timeout=20, in_slices=True)
    contest.play(WORKLOADS["a"], 2)
    assert {name: len(found.runs) for (_, name), found in contest.records.items()} == {RUNNER: 1, "fake": 2}
    assert contest.records["a", "fake"].seconds < 0.29 < contest.records["a", RUNNER].seconds < 0.6
    (pid,) = (pid for pid in peer.pids if str(fake.file) in Path(f"/proc/{pid}/cmdline").read_text())
    wait_until_stopped(pid)
    peer.close()


def test_slices_end_where_no_engine_is_left(pair: list[EngineProcess]) -> None:
    contest = PeerContest([pair[1]], VOCAB, timeout=20, in_slices=True)
    contest.play(WORKLOADS["a"], 4)  # it fails in the second round
    assert not contest.children and len(contest.records["a", RUNNER_OTHER].runs) == 1


@pytest.mark.usefixtures("quiet")
def test_ours_plays_once_however_slow(fake: PeerEngine, tmp_path: Path) -> None:
    own = replace(fake, name=RUNNER, options=fake.options | {"seconds": 1.0})
    contest = PeerContest(
        [EngineProcess(own, tmp_path), EngineProcess(replace(fake, name="peer"), tmp_path)], VOCAB, timeout=20
    )
    contest.play(WORKLOADS["a"], 2)
    assert len(contest.records["a", RUNNER].runs) == 1
    assert not contest.remarks
    for child in contest.children:
        child.close()


def test_a_peer_is_stopped_while_others_run(fake: PeerEngine, tmp_path: Path) -> None:
    child = EngineProcess(fake, tmp_path)
    pids = [pid for pid in tree(os.getpid()) if str(fake.file) in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(pids) == 1
    wait_until_stopped(pids[0])
    with child.awake():
        assert child.run([([1], 3)], 20)["num_tokens"] == [3]
    wait_until_stopped(pids[0])
    child.close()
    assert not any(stat(pid) for pid in pids)


def wait_until_stopped(pid: int) -> None:
    """The signal takes effect when the process is next looked at."""
    deadline = time.monotonic() + 20
    while (fields := stat(pid)) is not None and fields[0] != "T":
        assert time.monotonic() < deadline, fields
        time.sleep(0.01)
    assert fields is not None


def test_an_engine_is_told_with_how_many_adapters_requests_take_turns(fake: PeerEngine, tmp_path: Path) -> None:
    process = EngineProcess(fake, tmp_path)
    try:
        with process.awake():
            process.use_adapters(8)
            assert process.report() == {"shape": ["adapters", 8]}
    finally:
        process.close()


def test_no_timer_is_left_where_a_signal_ends_the_wait(
    fake: PeerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process would wait for it before it ends, as long as an engine may take."""
    process = EngineProcess(fake, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(process._process, "stdout", Mock(readline=Mock(side_effect=SystemExit(143))))
        with pytest.raises(SystemExit):
            process.report()
    process.close()
    for timer in (one for one in threading.enumerate() if isinstance(one, threading.Timer)):
        timer.join(1)
        assert not timer.is_alive()


def test_an_engine_that_does_not_load_says_where_to_look(fake: PeerEngine, tmp_path: Path) -> None:
    fake.file.write_text("raise SystemExit('no such thing')")
    with pytest.raises(EngineFailed, match=r"see .*fake\.log"):
        EngineProcess(fake, tmp_path)
    assert "no such thing" in (tmp_path / "fake.log").read_text()


def test_absent_peers_are_known_by_what_is_missing(tmp_path: Path) -> None:
    found = {engine.name: engine for engine in engines(tmp_path, "S", INT8)}
    assert set(found) == {RUNNER, CHAIN, "openvino-int8", "llamacpp-q8_0"}
    assert found["openvino-int8"].missing[0] == tmp_path / "v-ov" / "bin" / "python"
    assert not found[RUNNER].missing
    assert found[RUNNER].options["settings"]["quantization"] == INT8
    found = {engine.name: engine for engine in engines(tmp_path, "S", INT4)}
    peers = {"openvino-int4", "onnxruntime-int4", "llamacpp-q4_0", "llamacpp-q4_k_m"}
    assert set(found) == {RUNNER, RUNNER_INT8, CHAIN} | peers
    assert found[RUNNER_INT8].options["settings"]["quantization"] == INT8 and found[RUNNER_INT8].is_ours


@pytest.mark.parametrize("model", ["moe", "gpt-oss", "gpt2", "gemma3"])
def test_every_model_has_the_same_engines(model: str, tmp_path: Path) -> None:
    found = {engine.name: engine for engine in engines(tmp_path, model, FULL)}
    assert {RUNNER, CHAIN, "vllm-bf16", "llamacpp-bf16"} <= set(found)
    assert found["llamacpp-bf16"].needs[1] == tmp_path / "models" / model / f"{model}-bf16.gguf"


CONVERTER = """
import sys
_, directory, _, kind, _, target = sys.argv
print("loading", directory)
if kind == "q8_0":
    raise SystemExit("this family is not known")
open(target, "w").write(kind)
"""


def test_what_llamacpp_reads_is_converted_once_where_the_converter_is(tmp_path: Path) -> None:
    engine = next(e for e in engines(tmp_path, "moe", FULL) if e.name == "llamacpp-bf16")
    (tmp_path / "models" / "moe").mkdir(parents=True)
    assert convert_missing(tmp_path, engine) is None, "no converter"
    (tmp_path / "v-torch" / "bin").mkdir(parents=True)
    (tmp_path / "v-torch" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    made = convert_missing(tmp_path, engine)
    assert made == engine.needs[1] and made.read_text() == "bf16"
    assert [path.name for path in made.parent.iterdir()] == ["moe-bf16.gguf"]
    assert convert_missing(tmp_path, engine) is None, "it is there"
    runner = next(iter(engines(tmp_path, "moe", FULL)))
    assert convert_missing(tmp_path, runner) is None, "it reads the checkpoint itself"
    refused = next(e for e in engines(tmp_path, "moe", INT8) if e.name == "llamacpp-q8_0")
    with pytest.raises(ConversionFailed, match=r"llamacpp-q8_0: no moe-q8_0\.gguf: this family is not known"):
        convert_missing(tmp_path, refused)
    assert not refused.needs[1].exists()


def test_who_is_left_out_is_told_with_the_reason() -> None:
    contest = PeerContest([], VOCAB, timeout=1)
    contest.remark("peer: does not know the family")
    assert contest.remarks == ["peer: does not know the family"]


@pytest.mark.parametrize(
    ("options", "played"),
    [
        ([], ("S",)),
        (["--model", "both"], ("S", "M")),
        (["--family", "moe"], ("moe", "gpt-oss")),
        (["--family", "gemma"], ("gemma3",)),
        (["--family", "all"], tuple(SPECS)),
    ],
)
def test_models_of_a_run(options: list[str], played: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_peers", "--peers", ".", *options])
    assert arguments().models == played
