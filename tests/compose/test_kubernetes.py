"""The pods that deploy/ describes, as containers: they find each other, open to keys alone, and leave when asked."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.bench.common.stack import DockerError, Stack
from tests.compose.pods import as_compose
from tests.compose.stack import free_port, why_not
from tests.unit.deploy.rendering import ROOT, Manifest, pod_templates, render

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

REPLICAS = {"gateway": 1, "tokenizer": 2, "detokenizer": 1, "scheduler": 1, "worker": 2, "draft": 1, "store": 1}
WORDS = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
LEAVING_SECONDS = 10  # without a stream there is nothing to wait for


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(ROOT / "base")


@pytest.fixture(scope="module")
def stack(manifests: list[Manifest], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if reason := why_not():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("pods")
    Stack("pageant-pods-images", 0, directory).build()
    pods = as_compose(manifests, directory, free_port(), REPLICAS)
    try:
        pods.up()
        yield pods
    finally:
        pods.down()


def answer(stack: Stack, key: str) -> str:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    url = f"http://{stack.address}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(WORDS).encode(), headers), timeout=60) as found:
        return str(json.loads(found.read())["choices"][0]["text"])


@pytest.fixture
def key(stack: Stack) -> str:
    return stack.run_in("gateway", "cat", "/run/pageant/api-keys").removeprefix("acme:")


def health(stack: Stack) -> int:
    try:
        with urllib.request.urlopen(f"http://{stack.address}/health", timeout=10) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code


def until_health(stack: Stack, wanted: int) -> None:
    deadline = time.monotonic() + 60
    while health(stack) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_all_are_ready_and_serve_who_has_a_key(stack: Stack, key: str) -> None:
    assert {one["Health"] for one in stack.containers()} == {"healthy"}
    assert answer(stack, key) == answer(stack, key)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        answer(stack, "pk-other")
    joined = {line["member"].partition("-")[0] for line in stack.logs("scheduler") if line["event"] == "joined"}
    assert joined == set(REPLICAS) - {"scheduler"}


def test_probes_and_rights_are_what_the_manifests_say(stack: Stack, manifests: list[Manifest]) -> None:
    for _, template in pod_templates(manifests):
        service = template["metadata"]["labels"]["app.kubernetes.io/component"]
        (container,) = template["spec"]["containers"]
        stack.run_in(service, *container["livenessProbe"]["exec"]["command"])
        stack.run_in(service, *container["startupProbe"]["exec"]["command"])
        with pytest.raises(DockerError):  # nothing says that it is ready
            stack.run_in(service, "env", "PAGEANT_STATUS_FILE=/dev/null", *container["startupProbe"]["exec"]["command"])
        assert stack.run_in(service, "sh", "-c", "touch /app/x /run/pageant/curve.json 2>&1 | wc -l") == "2"
        assert stack.run_in(service, "sh", "-c", "cat /proc/1/cmdline | tr '\\0' ' '").startswith("python -m services.")


def test_who_is_asked_to_leave_leaves_and_the_next_one_is_found(stack: Stack, key: str) -> None:
    expected = answer(stack, key)
    for service in ("scheduler", "tokenizer", "worker", "gateway"):
        name = str(stack.containers(service)[0]["Name"])
        began = time.monotonic()
        stack.docker("stop", name, timeout=120)
        assert time.monotonic() - began < LEAVING_SECONDS, service
        assert stack.inspect(name, "{{.State.ExitCode}}") == "0", "it handled SIGTERM, as the first process"
        if service == "scheduler":
            until_health(stack, 503)
        stack.docker("start", name)
        deadline = time.monotonic() + 60
        while True:
            try:
                found: Any = health(stack) == 200 and answer(stack, key)
            except (OSError, urllib.error.HTTPError):
                found = None
            if found:
                break
            assert time.monotonic() < deadline, service
            time.sleep(0.2)
        assert found == expected, service
