"""`pageant launch`: a coding agent that talks to this server, set up by its own options and variables alone.

Nothing is written to the agent's files: how it is set up otherwise stays as it is.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import msgspec

TIMEOUT = 10.0  # seconds, for each question to the server
NO_KEY = "none"  # agents want one where the server does not
PROVIDER = "pageant"
KEY_VARIABLE = "PAGEANT_LAUNCH_KEY"
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
PACKAGES = {"codex": "@openai/codex", "claude": "@anthropic-ai/claude-code"}
CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


class ServedModel(msgspec.Struct, frozen=True):
    """What a server says of itself."""

    url: str
    key: str
    model: str
    max_model_len: int | None = None


class Launch(msgspec.Struct, frozen=True):
    """A program with its arguments, the variables that it gets beside those of this process, and those it does not."""

    command: list[str]
    variables: dict[str, str]
    without: tuple[str, ...] = ()

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in own.items() if name not in self.without} | self.variables


def codex(served: ServedModel, arguments: Sequence[str]) -> Launch:
    """Codex speaks /v1/responses.  Its web search is OpenAI's own tool, which no other server has."""
    provider = {"name": "Pageant", "base_url": f"{served.url}/v1", "wire_api": "responses"}
    if served.key:
        provider["env_key"] = KEY_VARIABLE
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    options = {
        "model_provider": json.dumps(PROVIDER),
        f"model_providers.{PROVIDER}": f"{{ {table} }}",
        "web_search": json.dumps("disabled"),
    }
    if served.max_model_len:
        options["model_context_window"] = str(served.max_model_len)
    given = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
    return Launch(["codex", *given, "-m", served.model, *arguments], {KEY_VARIABLE: served.key} if served.key else {})


def claude(served: ServedModel, arguments: Sequence[str]) -> Launch:
    """Claude Code speaks /v1/messages.  Each of the models that it chooses from is the one that is served."""
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key or NO_KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(CLAUDE_MODELS, served.model),
    }
    return Launch(["claude", *arguments], variables, without=("ANTHROPIC_API_KEY",))


AGENTS: dict[str, Callable[[ServedModel, Sequence[str]], Launch]] = {"codex": codex, "claude": claude}


def launch(agent: str, url: str, key: str, model: str, arguments: Sequence[str], *, shows: bool) -> None:
    """Become the agent; `shows`: print what would be run instead.  Raises ClickException where it would not work."""
    served = examine(url.rstrip("/"), key, model)
    made = AGENTS[agent](served, arguments)
    if shows:
        variables = [f"{name}={'...' if value and value == key else value}" for name, value in made.variables.items()]
        unset = [word for name in made.without for word in ("-u", name)]
        click.echo(shlex.join(["env", *unset, *variables, *made.command]))
        return
    program = shutil.which(made.command[0])
    if program is None:
        raise click.ClickException(f"{agent} is not installed: npm install -g {PACKAGES[agent]}")
    sys.stdout.flush()
    os.execve(program, made.command, made.environment(os.environ))


def examine(url: str, key: str, model: str) -> ServedModel:
    """The model that is served.  Raises ClickException where there is none, another, or one that calls no tools."""
    listed = _ask(url, key, "/v1/models")["data"]
    names = [entry["id"] for entry in listed]
    if model and model not in names:
        raise click.ClickException(f"{url} serves {', '.join(names)}, not {model}")
    entry = next(entry for entry in listed if not model or entry["id"] == model)
    body = {"model": entry["id"], "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
    _ask(url, key, "/v1/messages/count_tokens", body)
    return ServedModel(url, key, entry["id"], entry.get("max_model_len"))


def _ask(url: str, key: str, path: str, body: Any = None) -> Any:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise click.ClickException(f"{url}{path}: {_message(error)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise click.ClickException(f"no server answers at {url} ({reason}); `pageant serve` starts one") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)
