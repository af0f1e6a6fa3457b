"""What the services say of a run, read from a log and a histogram."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import serve_rates
from scripts.bench.serve_rates import Accounts, GatewayScrape, bucketed


def test_a_look_at_a_histogram_counts_from_the_one_before() -> None:
    before, after = bucketed([0.02, 0.02]), bucketed([0.02, 0.02, 0.06, 0.06])
    run = after.since(before)
    assert run.mean == pytest.approx(0.06) and 0.05 < run.percentile(50) <= 0.075
    assert bucketed([]).mean == 0 and bucketed([]).percentile(99) == 0


def test_an_account_has_what_ended_since_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaps: list[float] = [0.01]
    log = tmp_path / "gateway.log"
    log.write_text("")

    def look(url: str) -> GatewayScrape:
        assert url == "http://there"
        return bucketed(gaps)

    monkeypatch.setattr(serve_rates, "scrape", look)
    kept = Accounts(log, "http://there")
    failed = {"event": "request_failed", "e2e_ms": 1.0}
    ended = {"event": "request_finished", "ttft_ms": 30.0, "e2e_ms": 90.0}
    with log.open("a") as file:
        file.write(f"no JSON\n{json.dumps(failed)}\n{json.dumps(ended)}\n")
    gaps += [0.03, 0.05]
    account = kept.take()
    assert account.ttft.count == 1 and account.ttft.median == 0.03 and account.e2el.median == 0.09
    assert account.itl.mean == pytest.approx(0.04)
    assert kept.take().ttft.count == 0, "each is told once"
    kept.close()
