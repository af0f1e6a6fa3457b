"""Codex CLI and Claude Code, unmodified, by `pageant launch`: one round trip of a tool, which a script asks for.

PAGEANT_AGENTS names a folder of npm's that has both; scripts/prove_agents makes one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.messages import EncodeRequest, EncodeResult, TokenizeRequest
from shared.packing import pack_tokens
from shared.transport import Inbox
from tests.system.harness import ROOT
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.http.official import PARSERS
from tests.unit.gateway.troupe import LAST

AGENTS = os.environ.get("PAGEANT_AGENTS", "")
WORD = "zebra-42"  # is in a file of the agent's folder, and nowhere in what it is asked
SECONDS = 120
CALLS = {
    "codex": {"name": "exec_command", "arguments": {"cmd": "cat secret.txt"}},
    "claude": {"name": "Bash", "arguments": {"command": "cat secret.txt", "description": "Reads the file"}},
}
OPTIONS = {
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    "claude": ["--allowedTools=Bash", "-p"],
}

pytestmark = pytest.mark.skipif(
    not AGENTS, reason="needs @openai/codex and @anthropic-ai/claude-code (PAGEANT_AGENTS, scripts/prove_agents)"
)


class Script:
    """The model: it calls a tool once, and then says what the tool said."""

    def __init__(self, h: Http, call: dict[str, Any]) -> None:
        self.requests: list[TokenizeRequest] = []
        self._h = h
        self._call = call

    async def play(self) -> None:
        await asyncio.gather(*map(self._read, self._h.troupe.tokenizers.values()))

    async def _read(self, inbox: Inbox[Any]) -> None:
        while True:
            for message in await inbox.recv_batch():
                self._h.troupe.tells_ids(message)
                if isinstance(message, EncodeRequest):
                    self._h.troupe.tell(EncodeResult(message.request_id, pack_tokens([1, 2, 3])))
                if isinstance(message, TokenizeRequest):
                    self.requests.append(message)
                    text = self._say(message)
                    self._h.troupe.say(message, text[:20], token_ids=[7])
                    self._h.troupe.say(message, text[20:], at=(1, 20), token_ids=[8], **LAST)

    def _say(self, request: TokenizeRequest) -> str:
        assert request.chat is not None
        answers = [message.content for message in request.chat if message.role == "tool"]
        if answers:
            found = "found" if WORD in answers[-1] else f"missed in {answers[-1][:200]!r}"
            return f"<think>So.</think>The word was {found}: {WORD[::-1]}"
        return f"<think>I look.</think>I read it.<tool_call>{json.dumps(self._call)}</tool_call>"


@pytest.mark.parametrize("agent", ["codex", "claude"])
async def test_a_tool_is_called_and_its_answer_is_read(agent: str, tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    for folder in (work, home, home / ".codex"):
        folder.mkdir()
    (work / "secret.txt").write_text(WORD + "\n", encoding="utf-8")
    async with http(**(PARSERS | {"api_keys": "mine:secret-of-mine"})) as h:
        script = Script(h, CALLS[agent])
        playing = asyncio.create_task(script.play())
        server = h.troupe.gateway.http
        assert server is not None
        command = [sys.executable, "-m", "services.cli", "launch", "--url", f"http://127.0.0.1:{server.port}"]
        own = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
        path = f"{Path(AGENTS) / 'node_modules' / '.bin'}:{os.environ['PATH']}"
        process = await asyncio.create_subprocess_exec(
            *command, "--api-key", "secret-of-mine", agent, *OPTIONS[agent], "What is in secret.txt?",
            cwd=work, env=own | {"PATH": path, "HOME": str(home), "PYTHONPATH": str(ROOT)},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(SECONDS):
                said = (await process.communicate())[0].decode()
        finally:
            playing.cancel()
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, said
        assert f"The word was found: {WORD[::-1]}" in said, said
        assert len(script.requests) >= 2 and {one.header.tenant for one in script.requests} == {"mine"}
        calls = [call.name for message in script.requests[-1].chat or () for call in message.tool_calls]
        assert CALLS[agent]["name"] in calls
