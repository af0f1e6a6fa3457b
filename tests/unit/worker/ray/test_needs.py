"""What a group asks Ray for, and how it says what is missing."""

from __future__ import annotations

import pytest

from services.worker.ray.needs import rank_needs, shortage, totals
from shared.config import EngineSettings

NODES = [{"CPU": 4.0, "memory": 1e9}, {"CPU": 2.0, "GPU": 1.0}]


def test_a_rank_asks_for_as_many_cpus_as_it_has_threads() -> None:
    assert rank_needs(EngineSettings(num_threads=6)) == {"CPU": 6}
    assert rank_needs(EngineSettings()) == {"CPU": 1}
    assert rank_needs(EngineSettings(device="cuda")) == {"CPU": 1, "GPU": 1}


def test_nodes_are_summed() -> None:
    assert totals(NODES) == {"CPU": 6, "memory": 1e9, "GPU": 1}
    assert totals([]) == {}


@pytest.mark.parametrize(
    ("needs", "ranks", "strategy", "free", "said"),
    [
        ({"CPU": 2.0}, 1, "pack", {"CPU": 1.0}, "it needs 2 CPU; Ray has 1 CPU free of 6 on 2 nodes"),
        ({"CPU": 2.0}, 2, "pack", {"CPU": 3.0},
         "each of its 2 ranks needs 2 CPU; Ray has 3 CPU free of 6 on 2 nodes"),
        ({"CPU": 1.0, "GPU": 1.0}, 1, "pack", {"CPU": 3.0},
         "it needs 1 CPU and 1 GPU; Ray has 0 GPU free of 1 on 2 nodes"),
        ({"CPU": 1.0}, 3, "strict_spread", {"CPU": 6.0},
         "each of its 3 ranks needs 1 CPU on a node of its own (ray_placement=strict_spread); Ray has 2 nodes"),
        ({"CPU": 5.0}, 1, "pack", {"CPU": 6.0},
         "it needs 5 CPU; Ray has enough CPU free, but not in such pieces on its 2 nodes (pack)"),
    ],
)  # fmt: skip
def test_the_missing_resource_is_named(
    needs: dict[str, float], ranks: int, strategy: str, free: dict[str, float], said: str
) -> None:
    assert shortage(needs, ranks, strategy, totals(NODES), free, len(NODES)) == said
