"""What a load generator and the services say of the same requests, beside each other."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scripts.bench.serve_rates import beside
from services.cli.bench.generator import RequestOutcome
from shared.metrics import Timeline


def outcome(*times: float, sent: float, late: float = 0.0) -> RequestOutcome:
    return RequestOutcome(Timeline(0.0, list(times), [1] * len(times)), sent=sent, late=late)


def line(*times: float, sent: float) -> dict[str, float | None]:
    """As the gateway logs it; milliseconds."""
    gaps = [1000 * (after - before) for before, after in pairwise(times)]
    tpot = sum(gaps) / len(gaps) if gaps else None
    return {"ttft_ms": 1000 * (times[0] - sent), "tpot_ms": tpot, "itl_max_ms": max(gaps, default=0.0)}


def test_the_same_times_differ_by_nothing() -> None:
    times = (1.5, 1.75, 2.25), (2.0, 2.5, 2.75)
    found = beside("4/s", [outcome(*one, sent=1.0) for one in times], [line(*one, sent=1.0) for one in times])
    assert [one.what for one in found] == [
        f"4/s: {figure} p{q}, difference" for figure in ("TTFT", "TPOT", "longest gap") for q in (50, 99)
    ]
    assert all(one.measured == pytest.approx(0.0) and not one.missed for one in found)
    assert found[0].note == "client 750.00 ms, services 750.00 ms", "from when it left, not from when it was due"


def test_what_a_client_sees_later_is_missed_and_named() -> None:
    (ttft, _, tpot, _, longest, _) = beside(
        "4/s", [outcome(1.55, 1.75, 2.27, sent=1.0, late=0.02)], [line(1.5, 1.75, 2.25, sent=1.0)]
    )
    assert ttft.measured == pytest.approx(10.0) and ttft.missed
    assert tpot.measured == pytest.approx(4.0) and tpot.missed
    assert longest.measured == pytest.approx(4.0) and not longest.missed, "for information"
    assert ttft.note.endswith("; 1 sent late, the worst by 20 ms")


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    outcomes = [outcome(1.5, 2.0, sent=1.0), outcome(1.5, sent=1.0)]
    found = beside("4/s", outcomes[:1], [line(1.5, 2.0, sent=1.0), line(1.5, sent=1.0)])
    assert found[2].measured == pytest.approx(0.0)
