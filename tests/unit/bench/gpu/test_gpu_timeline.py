"""What the device's timeline says of the gap between steps."""

from __future__ import annotations

from typing import Any

import pytest


def measured(records: list[dict[str, Any]]) -> Any:
    from scripts.bench.gpu.timeline import (  # with torch, which not every worker of pytest should load
        events_of,
        measure,
    )

    return measure(events_of(records))


def record(name: str, begin: float, length: float, category: str = "kernel") -> dict[str, Any]:
    return {"name": name, "cat": category, "ts": begin, "dur": length}


def step(begin: float) -> list[dict[str, Any]]:
    """1,000 us: the model until 900, tokens chosen until 950, a copy until 960, 10 us of the next step's copies."""
    return [
        record("gather_inputs", begin, 10),
        record("attend_tiles", begin + 20, 880),
        record("choose_rows", begin + 900, 50),
        record("Memcpy DtoH (Device -> Pinned)", begin + 950, 10, "gpu_memcpy"),
        record("Memcpy HtoD (Pinned -> Device)", begin + 990, 10, "gpu_memcpy"),
    ]


def test_the_gap_is_all_between_the_steps_and_idle_is_all_without_work() -> None:
    other = [record("launch_step", 5, 3000, "cpu_op"), {"name": "process_name", "ph": "M"}]
    found = measured([*other, *step(2000.0), *step(0.0), *step(1000.0), record("gather_inputs", 3000, 10)])
    assert found.num_steps == 3
    assert found.step == pytest.approx(1e-3)
    assert found.gap == pytest.approx(50e-6)
    assert found.idle == pytest.approx(0.04)  # 10 us behind gather_inputs, 30 between the copies


def test_what_overlaps_is_not_idle_twice() -> None:
    beside = record("another stream", 100, 895)
    found = measured([*step(0.0), beside, record("gather_inputs", 1000, 10)])
    assert found.idle == pytest.approx(0.01)


@pytest.mark.parametrize("records", [[], step(0.0), [record("gather_inputs", 0, 1), record("gather_inputs", 9, 1)]])
def test_a_timeline_without_steps_is_refused(records: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"steps|no choose_rows"):
        measured(records)
