"""Arrival processes have the rate and the burstiness that were asked for; traces come out as they went in."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

from shared.packing import unpack_tokens
from shared.workload import (
    BlockPrompt,
    ChatPrompt,
    Ramp,
    RandomLengths,
    TextPrompt,
    TokenPrompt,
    arrival_times,
    at_times,
    ramp_times,
    random_requests,
    read_prompts,
    read_trace,
)

COUNT = 20_000


def gaps_of(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *times])]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_of_their_gamma_distribution(burstiness: float) -> None:
    times = arrival_times(COUNT, 8.0, burstiness, Random(1))
    gaps = gaps_of(times)
    assert times == sorted(times) and min(gaps) >= 0
    assert times[-1] == pytest.approx(COUNT / 8.0), "the run has exactly the rate that was asked for"
    variation = pstdev(gaps) / mean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_arrivals_are_independent_of_the_past() -> None:
    """Of exponential gaps, exp(-1) are longer than the mean, whatever came before."""
    gaps = gaps_of(arrival_times(COUNT, 5.0, 1.0, Random(2)))
    longer = [gap > 0.2 for gap in gaps]
    assert mean(longer) == pytest.approx(math.exp(-1), abs=0.02)
    after_long = [now for before, now in pairwise(longer) if before]
    assert mean(after_long) == pytest.approx(math.exp(-1), abs=0.02)


def test_constant_and_infinite_rates() -> None:
    assert arrival_times(4, 2.0, math.inf, Random(1)) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert arrival_times(3, math.inf, 1.0, Random(1)) == [0.0, 0.0, 0.0]
    assert arrival_times(0, 2.0, 1.0, Random(1)) == []


def test_arrivals_follow_their_seed() -> None:
    assert arrival_times(50, 3.0, 1.0, Random(7)) == arrival_times(50, 3.0, 1.0, Random(7))
    assert arrival_times(50, 3.0, 1.0, Random(7)) != arrival_times(50, 3.0, 1.0, Random(8))


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", math.sqrt(10.0))])
def test_ramps(strategy: str, middle: float) -> None:
    ramp = Ramp(strategy, 1.0, 10.0)  # type: ignore[arg-type]
    assert (ramp.rate_at(0.0), ramp.rate_at(1.0)) == (1.0, 10.0)
    assert ramp.rate_at(0.5) == pytest.approx(middle)
    gaps = gaps_of(ramp_times(1001, ramp, math.inf, Random(1)))
    assert gaps[0] == pytest.approx(1.0) and gaps[-1] == pytest.approx(0.1)
    assert gaps[500] == pytest.approx(1 / middle)
    drawn = gaps_of(ramp_times(COUNT, ramp, 1.0, Random(3)))
    half = COUNT // 2
    assert mean(drawn[half - 1000 : half + 1000]) == pytest.approx(1 / middle, rel=0.1)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_rates_that_make_no_sense(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        arrival_times(3, rate, burstiness, Random(1))


def test_random_requests_share_their_prefix_and_nothing_else() -> None:
    lengths = RandomLengths(input_len=20, output_len=10, prefix_len=8, range_ratio=0.5)
    requests = random_requests(200, lengths, 1000, Random(1))
    prompts = []
    for request in requests:
        assert isinstance(request.prompt, TokenPrompt)
        ids = unpack_tokens(request.prompt.token_ids(1000))
        assert len(ids) == request.num_prompt_tokens and 18 <= len(ids) <= 38
        assert all(0 <= token < 1000 for token in ids) and 5 <= request.max_tokens <= 15
        prompts.append(ids)
    assert len({tuple(ids[:8]) for ids in prompts}) == 1
    assert len({tuple(ids[8:]) for ids in prompts}) == len(prompts)
    assert {len(ids) for ids in prompts} == set(range(18, 39)), "uniform: every length comes up"
    with pytest.raises(ValueError, match="range-ratio"):
        random_requests(1, RandomLengths(range_ratio=1.0), 1000, Random(1))


def test_requests_are_given_their_times() -> None:
    requests = random_requests(3, RandomLengths(4, 2), 100, Random(1))
    assert [request.time for request in at_times(requests, [0.0, 0.5, 2.0])] == [0.0, 0.5, 2.0]
    with pytest.raises(ValueError):
        at_times(requests, [0.0])


def test_block_prompts_are_equal_where_their_names_are() -> None:
    one, two = BlockPrompt(20, 8, [1, 2, 3]), BlockPrompt(22, 8, [1, 2, 4])
    for vocab in (300, 1 << 16, 150_000):
        first, second = unpack_tokens(one.token_ids(vocab)), unpack_tokens(two.token_ids(vocab))
        assert (len(first), len(second)) == (20, 22)
        assert first[:16] == second[:16] and first[16:] != second[16:20]
        assert all(0 <= token < vocab for token in first + second)
    other = BlockPrompt(20, 8, [1, 2, 3], salt=1)
    assert other.token_ids(300)[:32] != one.token_ids(300)[:32]


def test_a_mooncake_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
        '{"timestamp": 3000, "input_length": 1024, "output_length": 9, "hash_ids": [0, 2]}\n'
    )
    trace = read_trace(path)
    assert [entry.time for entry in trace.entries] == [0.0, 2.0] and trace.duration == 4.0
    plain = list(trace.requests())
    assert [(r.time, r.num_prompt_tokens, r.max_tokens) for r in plain] == [(0.0, 700, 5), (2.0, 1024, 9)]
    scaled = list(trace.requests(5, speed=2.0, length_scale=0.1, longest=80))
    assert [r.time for r in scaled] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [(r.num_prompt_tokens, r.max_tokens) for r in scaled[:2]] == [(70, 1), (79, 1)]
    ids = [unpack_tokens(r.prompt.token_ids(500)) for r in scaled if isinstance(r.prompt, BlockPrompt)]
    assert ids[0][:51] == ids[1][:51] and ids[0][51:70] != ids[1][51:70], "blocks of 51, the first one shared"
    assert ids[2][:51] != ids[0][:51], "the second lap is about other contents"


def test_an_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:18:04.0319601,3180,8"
    )
    trace = read_trace(path)
    assert trace.entries[1].time == pytest.approx(60.0520001, abs=1e-6)
    requests = list(trace.requests())
    assert [(r.num_prompt_tokens, r.max_tokens) for r in requests] == [(4808, 10), (3180, 8)]
    first, second = (unpack_tokens(r.prompt.token_ids(1 << 17)) for r in requests if isinstance(r.prompt, BlockPrompt))
    assert len(first) == 4808 and first[:512] != second[:512]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"timestamp": 1, "input_length": 2}'),
        ("a.jsonl", ""),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2"),
        ("a.csv", "when,what\n1,2"),
    ],
)
def test_traces_that_cannot_be_read_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        read_trace(tmp_path / name)


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"question": "c", "answer": "d", "output_tokens": 7}\n{"prompt": "e"}\n')
    read = read_prompts(path, 16)
    assert [request.prompt for request in read] == [TextPrompt("a"), TextPrompt("c"), TextPrompt("e")]
    assert [request.max_tokens for request in read] == [16, 7, 16]
    assert read_prompts(path, 16, chat=True)[0].prompt == ChatPrompt("a")


def test_a_line_of_prompts_ends_where_json_lines_do(tmp_path: Path) -> None:
    path, text = tmp_path / "p.jsonl", "a\u2028b\u2029c\u0085d"
    path.write_text(f'{{"prompt": "{text}"}}\r\n{{"prompt": "e"}}\n', encoding="utf-8", newline="")
    assert [request.prompt for request in read_prompts(path, 16)] == [TextPrompt(text), TextPrompt("e")]


@pytest.mark.parametrize(
    "line",
    [
        b'{"answer": "d"}',
        b'{"prompt": 5}',
        b'{"prompt": "d", "output_tokens": [1]}',
        b'{"prompt": "\xff"}',
        b"[]",
        b"{",
    ],
)
def test_prompts_that_cannot_be_read_are_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "e"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2"):
        read_prompts(path, 16)


@pytest.mark.data
def test_the_real_traces_and_prompts(data_dir: Path) -> None:
    mooncake = read_trace(data_dir / "traces" / "mooncake-conversation.jsonl")
    assert len(mooncake.entries) == 12_031 and mooncake.duration == pytest.approx(3537, abs=3)
    assert mean(entry.num_prompt_tokens for entry in mooncake.entries) == pytest.approx(12_035, abs=1)
    for entry in mooncake.entries:
        assert entry.names is not None and 512 * len(entry.names) >= entry.num_prompt_tokens
    assert len(read_trace(data_dir / "traces" / "azure-2023-conv.csv").entries) == 19_366
    assert len(read_trace(data_dir / "traces" / "azure-2023-code.csv").entries) == 8_819
    counts = {path.stem: len(read_prompts(path, 64)) for path in (data_dir / "prompts").glob("*.jsonl")}
    assert counts == {"spec-bench": 480, "mt-bench": 80, "gsm8k-test": 1319, "human-eval": 164}
