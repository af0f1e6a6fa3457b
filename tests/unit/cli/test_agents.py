"""What `pageant launch` runs, and why it does not where that would not work."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from services.cli.agents import CLAUDE_MODELS, KEY_VARIABLE, ServedModel, claude, codex, examine
from services.cli.main import main
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.http.official import PARSERS

SERVED = ServedModel("http://127.0.0.1:8000", "", "stories", 512)


def settings_of(command: list[str]) -> dict[str, Any]:
    """What Codex reads of its options: values are TOML."""
    found: dict[str, Any] = {}
    for flag, word in itertools.pairwise(command):
        if flag == "-c":
            name, _, value = word.partition("=")
            found[name] = tomllib.loads(f"x = {value}")["x"]
    return found


def test_codex_is_given_a_provider() -> None:
    made = codex(SERVED, ["exec", "Hi"])
    found = settings_of(made.command)
    assert found["model_provider"] == "pageant"
    assert found["model_providers.pageant"] == {
        "name": "Pageant", "base_url": "http://127.0.0.1:8000/v1", "wire_api": "responses",
    }  # fmt: skip
    assert (found["web_search"], found["model_context_window"]) == ("disabled", 512)
    assert made.command[-4:] == ["-m", "stories", "exec", "Hi"] and not made.variables
    with_key = codex(ServedModel("http://x", "a key", "stories"), [])
    found = settings_of(with_key.command)
    assert found["model_providers.pageant"]["env_key"] == KEY_VARIABLE and "model_context_window" not in found
    assert with_key.variables == {KEY_VARIABLE: "a key"} and "a key" not in " ".join(with_key.command)


def test_claude_s_models_are_all_the_one_that_is_served() -> None:
    made = claude(SERVED, ["-p", "Hi"])
    environment = made.environment({"ANTHROPIC_API_KEY": "of the vendor", "HOME": "/home/x"})
    assert "ANTHROPIC_API_KEY" not in environment and environment["HOME"] == "/home/x"
    assert {environment[name] for name in CLAUDE_MODELS} == {"stories"}
    assert (environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_AUTH_TOKEN"]) == (SERVED.url, "none")
    assert made.command == ["claude", "-p", "Hi"]


async def looked(h: Http, key: str = "", model: str = "") -> ServedModel:
    """What `examine` finds; the server answers in this process meanwhile."""
    url = str(h.client.base_url).rstrip("/")
    found = asyncio.create_task(asyncio.to_thread(examine, url, key, model))
    answering = asyncio.create_task(h.answer_encode([1, 2]))
    await asyncio.wait({found, answering}, return_when=asyncio.FIRST_COMPLETED)
    if found.done():
        answering.cancel()
    return await found


async def test_a_server_is_looked_at_first() -> None:
    async with http(**PARSERS) as h:
        found = await looked(h)
        assert (found.model, found.max_model_len) == ("tiny", 512)
        assert await looked(h, model="tiny") == found
        with pytest.raises(click.ClickException, match="serves tiny, not other"):
            await looked(h, model="other")
    async with http(api_keys="mine:secret-of-mine", **PARSERS) as h:
        assert (await looked(h, "secret-of-mine")).key == "secret-of-mine"
        with pytest.raises(click.ClickException, match="an API key is needed"):
            await looked(h)


async def test_a_model_that_calls_no_tools_is_of_no_use_to_an_agent() -> None:
    async with http() as h:
        with pytest.raises(click.ClickException, match="tool_call_parser"):
            await looked(h)


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["launch", *arguments], env=environment)
    return done.exit_code, done.output


def test_no_server_and_no_agent_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, said = run("--url", "http://127.0.0.1:9", "codex")
    assert status == 1 and "`pageant serve` starts one" in said
    monkeypatch.setattr("services.cli.agents.examine", lambda *_: SERVED)
    monkeypatch.setenv("PATH", str(tmp_path))
    status, said = run("claude", "-p", "Hi")
    assert status == 1 and "npm install -g @anthropic-ai/claude-code" in said


def test_what_would_be_run_is_shown_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = ServedModel("http://x", "a-secret", "stories")
    monkeypatch.setattr("services.cli.agents.examine", lambda *_: keyed)
    status, said = run("--show", "--api-key", "a-secret", "claude", "-p", "Hi there")
    assert status == 0 and "a-secret" not in said
    words = shlex.split(said)
    assert words[:3] == ["env", "-u", "ANTHROPIC_API_KEY"] and words[-3:] == ["claude", "-p", "Hi there"]


def test_the_agent_takes_this_process_s_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "codex"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    became: list[Any] = []
    monkeypatch.setattr("services.cli.agents.examine", lambda *_: SERVED)
    monkeypatch.setattr(os, "execve", lambda *given: became.extend(given))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run("codex", "exec", "--json")[0] == 0
    assert became[0] == str(program) and became[1][-2:] == ["exec", "--json"]
    assert became[2]["PATH"] == str(tmp_path) and json.dumps(became[2])
