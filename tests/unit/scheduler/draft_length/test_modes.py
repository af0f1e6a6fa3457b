"""What a step of each mode is believed to take, by what few of them were measured to take."""

from __future__ import annotations

import pytest

from services.scheduler.draft_length.modes import (
    PLAIN,
    STIFFNESS,
    TRIALS,
    Cost,
    FittedLine,
    ModeTrial,
    SpeculationMode,
    believed,
    fitted,
)


def cost(seconds: float = 0.0, depth: float = 0.0, num_trials: int = 1) -> Cost:
    made = Cost()
    if num_trials:
        made.add(seconds, depth, num_trials)
    return made


def test_measurements_on_a_line_are_fitted_by_it_whatever_was_believed() -> None:
    """As exactly as they are many: what was believed counts as much as a spread of STIFFNESS."""
    line = FittedLine(0.010, 0.002)
    costs = [cost(line.at(depth), depth, 3) for depth in (1.0, 4.0, 9.0)]
    assert fitted(costs, 0.002) == pytest.approx(line)
    spread = 3 * sum((depth - 14 / 3) ** 2 for depth in (1.0, 4.0, 9.0))
    found = fitted(costs, 0.02)
    assert found.slope == pytest.approx((spread * 0.002 + STIFFNESS * 0.02) / (spread + STIFFNESS))
    assert found.at(14 / 3) == pytest.approx(line.at(14 / 3)), "through the middle of all in any case"


def test_a_mode_counts_by_its_trials() -> None:
    few, many = cost(0.010, 2.0, 1), cost(0.030, 6.0, 3)
    assert fitted([few, many], 0.005).at(5.0) == pytest.approx(0.025)


def test_one_measurement_has_the_slope_that_is_believed_and_none_goes_down() -> None:
    assert fitted([cost(0.02, 5.0)], 0.001) == pytest.approx((0.015, 0.001))
    steep = [cost(0.09, 1.0, 8), cost(0.01, 9.0, 8)]
    assert fitted(steep, 0.001).slope == 0.0, "more drafts are never quicker to verify"


def test_the_cost_of_a_mode_is_the_median_of_its_last_trials() -> None:
    made = Cost()
    for seconds in (0.5, 0.01, 0.02, 0.03):
        made.add(seconds, 4.0)
    assert made.seconds == pytest.approx(0.025) and made.depth == 4.0
    for _ in range(TRIALS):
        made.add(0.07, 2.0)
    assert (made.seconds, made.depth, made.num_trials) == (0.07, 2.0, TRIALS)


def test_a_trial_is_the_mean_of_its_steps_without_what_something_else_took() -> None:
    trial = ModeTrial()
    for seconds in (0.01, 0.03, 0.02, 9.0):
        trial.record(seconds, 3.0)
    assert 0.015 < trial.seconds < 0.05 and trial.depth == 3.0 and len(trial) == 4
    assert ModeTrial().depth == 0.0


def test_what_was_measured_tells_of_the_modes_between_and_beyond() -> None:
    modes = [PLAIN, *(SpeculationMode(count) for count in (2, 4, 8))]
    costs = dict(zip(modes, (cost(0.010), cost(num_trials=0), cost(0.018, 4.0, 4), cost(num_trials=0)), strict=True))
    found = believed(costs, 0.002)
    assert found[PLAIN] == 0.010, "it is no mode with drafts"
    assert [found[mode] for mode in modes[1:]] == pytest.approx([0.014, 0.018, 0.026])


def test_while_only_plain_steps_were_measured_each_draft_token_costs_what_the_draft_says() -> None:
    modes = [PLAIN, SpeculationMode(3), SpeculationMode(3, runs_ahead=True)]
    costs = {mode: cost(num_trials=0) for mode in modes}
    costs[PLAIN] = cost(0.010)
    found = believed(costs, 0.002)
    assert found[modes[1]] == pytest.approx(0.016)
    assert 0.010 <= found[modes[2]] < found[modes[1]], "what is run ahead hides a part of it"
