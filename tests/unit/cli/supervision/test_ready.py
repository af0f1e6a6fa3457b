"""What serve says: what it waits for, that everything is there, and its last words."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.cli import serve
from services.cli.addresses import ready_block
from services.cli.supervision.processes import Starter
from services.cli.supervision.supervisor import Role, Supervisor
from shared.actor.status import words_path, write_last_words
from shared.config import DeploymentSettings, Settings
from tests.unit.cli.supervision.test_supervisor import FakeProcess


def test_one_block_has_the_page_a_curl_line_and_the_chat() -> None:
    lines = ready_block(Settings()).splitlines()
    assert lines[0] == "ready: pageant-stories at 127.0.0.1:50051"
    assert lines[1].split() == ["page", "http://127.0.0.1:8000"]
    curl = shlex.split(lines[2])
    assert curl[1:3] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(curl[-1])["prompt"] and "Authorization" not in lines[2]
    assert lines[3].split() == ["chat", "pageant", "chat"]


def test_it_says_what_differs_from_the_defaults() -> None:
    text = ready_block(Settings.of(host="::", port=1, http_port=2, api_keys="a:12345678", tls_cert_file="c.pem"))
    assert "https://[::1]:2" in text and "Authorization: Bearer YOUR_KEY" in text and "--cacert c.pem" in text
    assert "pageant chat --address [::1]:1 --api-key YOUR_KEY --tls-ca c.pem" in text and "12345678" not in text
    assert "curl" not in ready_block(Settings.of(http_port=-1))


class Joining:
    """A starter whose children join one after the other."""

    def __init__(self) -> None:
        self.joined: set[str] = set()
        self.waiting: set[str] = set()

    def waits_for(self, child: Any) -> str:
        return "it needs 1 GPU" if child.role.name in self.waiting else ""

    def is_ready(self, child: Any) -> bool:
        return child.role.name in self.joined


def test_it_is_not_said_before_all_have_joined(capsys: pytest.CaptureFixture[str]) -> None:
    cast = [Role("worker"), Role("worker", 1), Role("gateway")]
    supervisor = Supervisor(cast, lambda role: FakeProcess(role.name, []), report=lambda _: None)
    supervisor.start()
    starter: Any = Joining()
    now = [0.0]
    waiting = serve.JoinProgress(supervisor, starter, lambda _: None, lambda: now[0])
    starter.joined |= {"gateway-0", "worker-0"}
    assert not waiting.is_over() and not capsys.readouterr().err
    now[0] = serve.FIRST_WORD
    assert not waiting.is_over() and not waiting.is_over()
    assert capsys.readouterr().err == "pageant: still starting: worker-1\n", "once"
    starter.waiting.add("worker-1")
    assert waiting.is_over(), "the others serve"
    starter.waiting.clear()
    assert not waiting.is_over()
    starter.joined.add("worker-1")
    assert waiting.is_over()


def test_a_gateway_that_serves_is_not_enough() -> None:
    supervisor = Supervisor([Role("gateway")], lambda role: FakeProcess(role.name, []), report=lambda _: None)
    supervisor.start()
    client: Any = SimpleNamespace(serving=True)
    answers = [False, False, True]
    assert serve.wait_until_serving(client, supervisor, lambda: False, lambda: answers.pop(0))
    assert not answers, "it was said before all had joined"


def test_the_last_words_of_a_service_are_those_beside_its_status_file(tmp_path: Path) -> None:
    status_file = tmp_path / "status"
    write_last_words(DeploymentSettings(status_file=str(status_file)), "no such tensor")
    assert words_path(status_file).read_text() == "no such tensor"
    write_last_words(DeploymentSettings(status_file=str(tmp_path / "not" / "there")), "lost, without an error")
    starter = Starter(Settings())
    role = Role("worker")
    assert "above" in starter.last_words(role)
    starter._newest[role] = status_file
    assert starter.last_words(role) == "no such tensor"
