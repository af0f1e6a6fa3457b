"""Every metric on timestamps made by hand, and percentiles against numpy's."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from shared.metrics import (
    Acceptance,
    ModelWork,
    Slo,
    Tally,
    Timeline,
    parse_slo,
    peak_concurrency,
    peak_rate,
    per_minute,
    percentile,
    rate,
    serial_rate,
    summarise,
    utilisation,
)

QS = (0, 1, 10, 50, 90, 95, 99, 99.9, 100)


def timeline(start: float, *outputs: tuple[float, int]) -> Timeline:
    made = Timeline(start)
    for time, count in outputs:
        made.add(time, count)
    return made


def test_latencies_of_a_request_whose_tokens_come_one_by_one() -> None:
    times = timeline(10.0, (10.5, 1), (10.6, 1), (10.9, 1), (11.0, 1))
    assert times.ttft == pytest.approx(0.5)
    assert times.e2el == pytest.approx(1.0)
    assert times.itl == pytest.approx([0.1, 0.3, 0.1])
    assert times.tbt == pytest.approx(times.itl)
    assert times.tpot == pytest.approx(0.5 / 3)
    assert times.tpot_with_first == pytest.approx(1.0 / 4)
    assert times.tpot == pytest.approx(sum(times.itl) / len(times.itl)), "TPOT without the first is the mean gap"


def test_tokens_that_come_together_are_one_output_and_several_tokens() -> None:
    times = timeline(0.0, (0.2, 2), (0.5, 3))
    assert times.num_tokens == 5
    assert times.itl == pytest.approx([0.3])
    assert times.tbt == pytest.approx([0.0, 0.3, 0.0, 0.0])
    assert times.tpot == pytest.approx(0.3 / 4)


def test_what_has_not_come_has_no_latency() -> None:
    nothing, one = timeline(1.0), timeline(1.0, (3.0, 1))
    assert (nothing.ttft, nothing.e2el, nothing.tpot, nothing.tpot_with_first) == (None, None, None, None)
    assert (one.ttft, one.e2el, one.tpot, one.tpot_with_first) == (2.0, 2.0, None, 2.0)
    assert nothing.itl == nothing.tbt == one.itl == one.tbt == []


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000])
def test_percentiles_are_numpy_s(size: int) -> None:
    values = [random.Random(size).expovariate(3) for _ in range(size)]
    summary = summarise(values, QS)
    for q in QS:
        expected = float(np.percentile(values, q))
        assert percentile(values, q) == pytest.approx(expected, rel=1e-12)
        assert summary.percentiles[q] == pytest.approx(expected, rel=1e-12)
    assert summary.mean == pytest.approx(float(np.mean(values)))
    assert summary.std == pytest.approx(float(np.std(values)), abs=1e-12)
    assert summary.median == summary.percentiles[50.0]


@pytest.mark.parametrize("size", [1, 2, 7, 500])
def test_a_tally_is_within_half_a_step_of_the_values_themselves(size: int) -> None:
    rng = random.Random(size)
    tally, values = Tally(step=1e-3), []
    for _ in range(size):
        value, times = rng.expovariate(5), rng.randint(1, 3)
        tally.add(value, times)
        values += [value] * times
    for q in QS:
        assert tally.summary([q]).percentiles[float(q)] == pytest.approx(
            float(np.percentile(values, q)), abs=0.5e-3 + 1e-9
        )
    whole, counted = summarise(values), tally.summary()
    assert counted.count == whole.count == sum(tally.items().values())
    assert (counted.mean, counted.std) == pytest.approx((whole.mean, whole.std), abs=1e-3)


def test_nothing_has_no_percentile_and_no_percentile_is_outside() -> None:
    assert math.isnan(percentile([], 50)) and math.isnan(Tally().summary().percentiles[99.0])
    assert math.isnan(summarise([]).median) and math.isnan(Tally().summary().mean)
    with pytest.raises(ValueError, match=r"100\.5"):
        percentile([1.0], 100.5)


def test_rates() -> None:
    assert rate(30, 10) == 3.0
    assert per_minute(30, 10) == 180.0
    assert rate(30, 0) == 0.0
    assert serial_rate([0.5, 0.25, 0.25]) == 3.0


def test_the_busiest_second_and_moment() -> None:
    assert peak_rate([(0.1, 2), (0.9, 2), (1.1, 5), (3.0, 1)]) == 5.0
    assert peak_rate([(0.1, 2), (0.9, 2), (1.1, 5)], window=0.5) == 10.0
    assert peak_rate([]) == 0.0
    assert peak_concurrency([(0, 2), (1, 3), (2, 4), (5, 6)]) == 2, "one ends as another starts"
    assert peak_concurrency([(0, 10), (1, 9), (2, 8)]) == 3
    assert peak_concurrency([]) == 0


def test_an_objective_counts_only_who_meets_all_of_it() -> None:
    slo = parse_slo(["ttft:200", "tpot:50"])
    assert slo == Slo(ttft=0.2, tpot=0.05) and str(slo) == "ttft:200 tpot:50"
    assert slo.met(0.2, 0.05, 100.0)
    assert slo.met(0.1, None, 0.1), "one token has no time per token after the first"
    assert not slo.met(0.21, 0.01, 1.0)
    assert not slo.met(0.1, 0.06, 1.0)
    assert not Slo() and Slo(e2el=1.0) and Slo().met(9e9, 9e9, 9e9)


@pytest.mark.parametrize("word", ["ttft", "itl:5", "ttft:fast", "ttft:0", "e2el:-1", "ttft:nan"])
def test_an_objective_that_makes_no_sense_is_named(word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_slo([word])


def test_work_of_a_step_against_the_formula_by_hand() -> None:
    """Two layers of hidden 8, 2 heads of 4, one KV head, feed-forward 16, vocabulary 10."""
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k and v, o, three of the feed-forward
    work = ModelWork(2 * layer, 8 * 10, num_query_features=2 * 2 * 4, kv_bytes_per_token=2 * 2 * 4 * 2)
    decode = 2 * (2 * layer) + 2 * 80 + 2 * (2 * 4 + 2 * 4) * 2 * 5  # one query, 5 keys, 2 heads of 4, 2 layers
    assert work.flops(num_tokens=1, num_samples=1, num_pairs=5) == decode
    assert utilisation(work.flops(1, 1, 5), seconds=2.0, peak=decode) == 0.5
    assert utilisation(1.0, 0.0, 1.0) == 0.0


def test_acceptance() -> None:
    then, now = Acceptance(1, 4, 1, [1]), Acceptance(11, 44, 23, [10, 8, 5])
    assert now.since(then) == Acceptance(10, 40, 22, [9, 8, 5])
    assert now.since(then).rate == 0.55
    assert now.since(then).length == pytest.approx(3.2)
    assert now.since(then).rates_per_position == [0.9, 0.8, 0.5]
    assert (Acceptance().rate, Acceptance().length, Acceptance().rates_per_position) == (0.0, 1.0, [])
