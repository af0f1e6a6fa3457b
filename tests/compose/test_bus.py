"""The bus between containers is closed: keys of its own for each deployment, and nothing for who lacks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.common.stack import SERVICES, Stack
from tests.compose.stack import KEYS_ADVISED, running_stack
from tests.compose.streams import complete

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

KEYS = "/run/pageant/curve.json"
STRANGER = Path(__file__).with_name("stranger.py")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("compose"), num_blocks=1024) as started:
        yield started


def test_keys_are_made_at_the_first_start_and_are_the_services_alone(stack: Stack) -> None:
    modes = {stack.run_in(service, "stat", "-c", "%a %u", "/run/pageant", KEYS) for service in SERVICES}
    assert modes == {"700 1000\n600 1000"}
    first = {stack.run_in(service, "cat", KEYS) for service in SERVICES}
    assert len(first) == 1, "one deployment, one set of keys"
    stack.down()
    stack.up()
    assert stack.run_in("scheduler", "cat", KEYS) not in first, "another deployment has others"


def test_who_lacks_the_keys_gets_nothing_and_changes_nothing(stack: Stack) -> None:
    expected = complete(stack.address)
    ready = [line for line in stack.logs() if line["event"] == "ready"]
    addresses = [line["address"] for line in ready]
    assert {line["service"] for line in ready} == set(SERVICES)
    before = {one["ID"]: one["State"] for one in stack.containers()}
    said = stack.docker(
        "run", "--rm", "--network", f"{stack.project}_default", "--entrypoint", "python", "-e", "PYTHONPATH=/app",
        "-v", f"{STRANGER}:/stranger.py:ro", "pageant-front", "/stranger.py", *addresses,
    )  # fmt: skip
    assert json.loads(said) == {"frames": 0}
    assert complete(stack.address) == expected
    assert {one["ID"]: one["State"] for one in stack.containers()} == before, (
        "no container ended, none was started again"
    )
    lines = [line for line in stack.logs() if line["event"] != KEYS_ADVISED]
    events = [line for line in lines if "stranger" in str(line) or line["level"] not in ("debug", "info")]
    assert not events, "no service has logged anything of it"
