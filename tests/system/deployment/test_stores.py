"""A real store beside a real troupe: what a killed worker had computed is fetched, after a scheduler's death too; and a
store that is killed costs nothing but misses."""

from __future__ import annotations

import random
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.supervision.orders import send_order
from services.scheduler.blocks.lookups import REST_SECONDS
from shared.processes.supervision import SupervisorOrder, desk_path
from tests.store_systems import SYSTEMS
from tests.system.harness import Answer, Troupe, ask, troupe

PROMPT = random.Random(3).choices(range(4, 4000), k=500)
OPTIONS = ("--num-blocks", "256", "--num-threads", "1", "--draft", "off", "--store-memory", "64MiB")
SECONDS = 20.0


def answered(running: Troupe, prompt: list[int] = PROMPT) -> Answer:
    ((answer,),) = running.generate([ask(token_ids=prompt, max_tokens=16, temperature=0.8, seed=4, ignore_eos=True)])
    return answer


def stored(running: Troupe) -> int:
    """Blocks that workers gave to stores."""
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=10) as answer:
        found = re.search(r"^pageant_blocks_stored_total(?:\{.*\})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def replaced(running: Troupe, service: str) -> None:
    """Kill a service, and wait until the next one serves."""
    before = running.pids(service)
    running.kill(service)
    until(lambda: len(running.pids(service)) == 1 and running.pids(service) != before, f"no {service} comes back")
    running.until_serving()


def test_a_successor_fetches_and_computes_nothing_twice(tmp_path: Path) -> None:
    with troupe(tmp_path, *OPTIONS) as running:
        first = answered(running)
        assert first.cached_tokens == 0
        until(lambda: stored(running) >= len(PROMPT) // 16, "its blocks are not stored")
        replaced(running, "worker")
        second = answered(running)
        assert second.token_ids == first.token_ids
        assert second.cached_tokens >= 0.9 * len(PROMPT), "fetched, not computed"
        replaced(running, "scheduler")  # the next life hears from the store what it has
        replaced(running, "worker")
        third = answered(running)
        assert (third.token_ids, third.cached_tokens) == (first.token_ids, second.cached_tokens)
        assert send_order(desk_path(tmp_path / "run"), SupervisorOrder(scale={"store": 2}), lambda line: None)
        assert len(running.pids("store")) == 2
        running.kill("store")
        running.kill("worker")
        running.until_serving()
        assert answered(running).token_ids == first.token_ids


@pytest.mark.parametrize("system", SYSTEMS)
def test_another_deployment_fetches_what_this_one_has_computed(system: str, tmp_path: Path) -> None:
    """Both have a store, and both stores the same backend."""
    with SYSTEMS[system](tmp_path) as (url, _):
        (here := tmp_path / "here").mkdir()
        (there := tmp_path / "there").mkdir()
        options = (*OPTIONS, "--store-backend", url)
        with troupe(here, *options) as one, troupe(there, *options) as other:
            for number in range(4):  # on a busy machine the backend may answer too late, and is left alone for a while
                prompt = [4 + number, *PROMPT]
                first = answered(one, prompt)
                time.sleep(2.0)  # for the last blocks to be stored, and to be behind the store
                second = answered(other, prompt)
                assert (second.token_ids, first.cached_tokens) == (first.token_ids, 0)
                if second.cached_tokens >= 0.9 * len(prompt):
                    return  # fetched, not computed
                time.sleep(REST_SECONDS)
            pytest.fail("whatever is asked for is computed again")
