"""Step times: rooflines by hand, fits that find what made their data."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import msgspec
import pytest

from services.scheduler.state.step import Step
from services.simulator.fitting import (
    Fitted,
    choose_knots,
    errors,
    fit,
    hats,
    non_negative_least_squares,
    read_recording,
    turnaround,
    undisturbed,
)
from services.simulator.hardware import DEVICES, SHAPES, Device, Roofline, num_blocks, shape_of, work_of
from shared.errors import ConfigError
from shared.metrics import ModelWork
from shared.metrics.steps import RecordedStep, StepWork, work_of_columns

DEVICE = Device("toy", 1e9, 1e6, 1e9, bandwidth_share=0.5, matrix_share=0.5, step_overhead=0.1, row_overhead=0.01)
MODEL = ModelWork(10_000, 1_000, num_query_features=100, kv_bytes_per_token=10)


def test_the_work_of_a_step_is_the_sum_over_its_sequences() -> None:
    """A decode at position 9 (10 keys), and tokens 4, 5, 6 of a prompt, which see 5, 6 and 7 keys."""
    step = Step(0, num_computed=[9, 4], num_scheduled=[1, 3], num_samples=[1, 0])
    assert work_of(step) == StepWork(4, 2, 1, num_context=10 + 7, num_pairs=10 + 5 + 6 + 7)


@pytest.mark.parametrize("seed", range(20))
def test_pairs_equal_a_count_one_by_one(seed: int) -> None:
    rng = Random(seed)
    computed, scheduled = ([rng.randrange(30) for _ in range(8)], [rng.randint(1, 30) for _ in range(8)])
    pairs = sum(c + i + 1 for c, s in zip(computed, scheduled, strict=True) for i in range(s))
    assert work_of_columns(computed, scheduled, 0).num_pairs == pairs


def test_a_roofline_by_hand() -> None:
    roofline = Roofline(DEVICE, MODEL)
    weights, rate = 2 * 11_000 / 5e5, 5e8
    one = roofline.seconds(StepWork(1, 1, 1, 100, 100))
    assert one == pytest.approx(0.1 + 0.01 + weights + 10 * 100 / 5e5), "a decode step reads"
    many = roofline.seconds(StepWork(10_000, 1, 0, 10_000, 50_005_000))
    arithmetic = 2 * 10_000 * 10_000 / rate + 4 * 100 * 50_005_000 / rate
    assert many == pytest.approx(0.1 + 0.01 + arithmetic), "a prompt computes"


def test_an_8b_model_has_the_figures_that_are_known_of_it() -> None:
    work = SHAPES["llama-3-8b"].work()
    embedding = 4096 * 128_256
    assert work.num_matrix_params + work.num_head_params + embedding == pytest.approx(8.03e9, rel=0.001)
    assert work.kv_bytes_per_token == 131_072
    seconds = Roofline(DEVICES["h200"], work).seconds(StepWork(1, 1, 1, 1000, 1000))
    assert 3e-3 < seconds < 6e-3, "15 GB over 3.84 TB/s, and a millisecond"


def test_blocks_fill_what_weights_leave() -> None:
    work = SHAPES["llama-3-8b"].work()
    found = num_blocks(DEVICES["h200"], work, 16, 0.9)
    assert found * 16 * 131_072 == pytest.approx(0.95 * (0.9 * 141e9 - work.weight_bytes), rel=1e-4)
    with pytest.raises(ConfigError, match="l4"):
        num_blocks(DEVICES["l4"], SHAPES["llama-3-70b"].work(), 16, 0.9)


def test_a_shape_is_read_from_a_model_s_directory(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
              "vocab_size": 100, "architectures": ["LlamaForCausalLM"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(str(tmp_path))
    assert (shape.num_key_value_heads, shape.head_dim) == (4, 16)
    with pytest.raises(ConfigError, match="nowhere"):
        shape_of("nowhere")


def test_hats_interpolate_and_extrapolate() -> None:
    knots, heights = [1.0, 4.0, 8.0], [2.0, 5.0, 6.0]

    def at(x: float) -> float:
        return sum(w * h for w, h in zip(hats(knots, x), heights, strict=True))

    assert [at(x) for x in (0.5, 1, 2, 4, 6, 8, 12)] == pytest.approx([2, 2, 3, 5, 5.5, 6, 7])
    assert hats([3.0], 100) == [1.0]


def test_least_squares_find_their_coefficients_and_none_below_zero() -> None:
    rng = Random(1)
    rows = [[rng.random(), 10 * rng.random(), rng.random() * 1e-3] for _ in range(50)]
    truth = [2.0, 0.5, 300.0]
    targets = [sum(a * b for a, b in zip(row, truth, strict=True)) for row in rows]
    assert non_negative_least_squares(rows, targets) == pytest.approx(truth, rel=1e-4)
    against = [row[0] - 0.05 * row[1] for row in rows]
    found = non_negative_least_squares(rows, against)
    assert min(found) >= 0 and found[1] == 0


def recorded(model: Fitted, count: int, noise: float, rng: Random) -> list[RecordedStep]:
    steps = []
    for index in range(count):
        scheduled = [1] * rng.randint(1, 32) + ([rng.randint(1, 400)] if index % 3 == 0 else [])
        work = work_of_columns([rng.randrange(500) for _ in scheduled], scheduled, len(scheduled))
        seconds = model.seconds(work) * (1 + noise * (2 * rng.random() - 1))
        steps.append(RecordedStep(work.num_tokens, work.num_sequences, work.num_samples, work.num_context,
                                  work.num_pairs, 0.0, seconds))  # fmt: skip
    return steps


@pytest.mark.parametrize(("noise", "bound"), [(0.0, 0.02), (0.1, 0.11)])
def test_a_fit_foretells_steps_that_it_has_not_seen(noise: float, bound: float) -> None:
    """A machine that reads weights below 16 tokens and multiplies above."""
    truth = Fitted([1, 16, 512], [0.005, 0.006, 0.1], [2e-7, 1e-9, 1e-5])
    steps = recorded(truth, 600, noise, Random(3))
    found = fit(steps[::2])
    assert min(found.heights) >= 0 and min(found.slopes) >= 0
    assert errors(found, steps[1::2]).percentiles[90.0] < bound


def test_what_requests_take_from_the_steps_they_meet_is_told_apart() -> None:
    """They come more often during long steps, whose length is not their doing."""
    truth = Fitted([1, 16, 512], [0.005, 0.006, 0.1], [2e-7, 1e-9, 1e-5])
    rng = Random(4)
    alone = recorded(truth, 600, 0.1, rng)
    arrivals = [sum(rng.random() < step.seconds for _ in range(40)) for step in alone]
    met = [
        msgspec.structs.replace(step, seconds=step.seconds + 0.002 * count)
        for step, count in zip(alone, arrivals, strict=True)
    ]
    found = fit(met, arrivals)
    assert found.per_arrival == pytest.approx(0.002, rel=0.15)
    assert errors(found, alone).percentiles[90.0] < 0.13
    assert fit(alone, arrivals).per_arrival < 0.0003 and fit(met).per_arrival == 0.0
    calm = undisturbed(met, arrivals, 0.002)
    assert [step.seconds for step in calm] == pytest.approx([step.seconds for step in alone])
    assert undisturbed(alone[:1], [1000], 0.002)[0].seconds == alone[0].seconds / 2


def test_too_few_steps_are_not_fitted() -> None:
    with pytest.raises(ValueError, match="at least"):
        fit(recorded(Fitted([1.0], [1.0], [0, 0, 0]), 5, 0, Random(1)))


def test_knots_are_where_steps_are() -> None:
    assert choose_knots([1] * 50 + [2] * 50 + [64] * 50 + [65] * 3) == [1, 2, 64]
    assert choose_knots([5] * 30) == [5]


def test_recordings_are_read_and_what_is_wrong_in_them_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    steps = [RecordedStep(1, 1, 1, 5, 5, start, 0.01) for start in (0.0, 0.0101, 0.0202, 5.0)]
    path.write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))
    assert turnaround(steps) == pytest.approx(1e-4), "what it waited for work is no pause of its own"
    assert [step.seconds for step in read_recording(path)] == pytest.approx([0.0101] * 4)
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1"):
        read_recording(path)
