"""The engine that `scripts/bench_peers` measures is the real one: the scheduler's core and a real runner."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.peers.engines.pageant_runner import Runner

MODEL = Path(__file__).resolve().parents[2] / "models" / "pageant-stories"
SETTINGS = {"model": str(MODEL), "num_blocks": 128, "max_num_seqs": 4, "num_threads": 1}


def test_every_request_gets_its_tokens_and_nothing_is_left_over() -> None:
    engine = Runner({"settings": SETTINGS})
    requests = [([5 + index, 6, 7, 8], 3 + index) for index in range(7)]  # more than there are rows
    for _ in range(2):
        answer = engine.run(requests)
        assert answer["num_tokens"] == [count for _, count in requests]
        assert answer["first"] > 0
    assert engine.is_idle
    assert engine.report()["worker_peak_rss"] > 1 << 20
