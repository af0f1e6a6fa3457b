"""The terminal programs: how far a completion goes, what a chat remembers, which key `top` shows."""

from __future__ import annotations

import http.server
import os
import pty
import re
import select
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from services.cli.display import terminal
from services.cli.display.client import Figures
from services.cli.display.terminal import history_path, line_editing
from services.cli.display.top import MetricsReader, MetricsSample, View, seconds
from services.cli.main import main
from shared.exposition import RequestMeter, exposition


class FakeClient:
    """Remembers what it was asked, and answers in one piece."""

    address = "here"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def generate(self, sampling: dict[str, Any], write: Any, **request: Any) -> tuple[str, Figures]:
        self.asked.append(sampling)
        write("text")
        figures = Figures()
        figures.finish_reason = "stop"
        return "text", figures


@pytest.mark.parametrize(("given", "wanted"), [({}, 256), ({"max_tokens": 3}, 3), ({"min_tokens": 300}, 300)])
def test_a_completion_goes_to_its_end_or_256_tokens(
    given: dict[str, int], wanted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    client: Any = FakeClient()
    assert terminal.generate(client, "prompt", given) == 0
    assert client.asked[0]["max_tokens"] == wanted
    assert "finish reason: stop" in capsys.readouterr().err


def test_a_history_is_kept_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = history_path()
    with line_editing(path):
        readline.add_history("once upon a time")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert readline.get_current_history_length() == 0
    with line_editing(path):
        assert readline.get_history_item(1) == "once upon a time"


def test_a_history_that_cannot_be_kept_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with line_editing(tmp_path / "file" / "history"):
        pass


CONTROL = re.compile(rb"\x1b\[[?0-9;]*[A-Za-z]")
CHAT = """
import sys
from services.cli.display import terminal
class Client:
    address = "here"
    def generate(self, sampling, write, chat):
        write("heard " + chat["messages"][-1]["content"])
        return "", "figures"
sys.exit(terminal.chat(Client(), "", {}))
"""


def test_a_chat_at_a_terminal_edits_lines_and_takes_one_back(tmp_path: Path) -> None:
    """Ctrl-C takes a line back, the up arrow brings the last one again, Ctrl-D leaves."""
    pytest.importorskip("readline")
    main_end, child_end = pty.openpty()
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", CHAT], stdin=child_end, stdout=child_end, stderr=child_end, env=environment,
        start_new_session=True, preexec_fn=lambda: __import__("fcntl").ioctl(0, 0x540E, 0),
    ) as process:  # fmt: skip
        os.close(child_end)
        said = b""
        try:
            for expected, typed, pressed in (
                (b"> ", b"hexo\x1b[D\x1b[D\x04l\x1b[C\r", b""),  # hexo: back twice, delete x ("heo"), l, on: "helo"
                (b"heard helo", b"\x03", b""),
                (b"/quit ends", b"\x1b[A\r", b"\x03"),
                (b"heard helo", b"\x04", b""),
            ):
                begun = len(said)
                while expected not in said[begun:] or not CONTROL.sub(b"", said).endswith(b"> "):
                    # The interpreter sees a Ctrl-C that comes before it waits for a key only with the next key.
                    for _ in range(60):
                        if select.select([main_end], [], [], 1)[0]:
                            break
                        os.write(main_end, pressed)
                    else:
                        pytest.fail(f"no answer: {said!r}")
                    said += os.read(main_end, 4096)
                os.write(main_end, typed)
            assert process.wait(20) == 0
        finally:
            process.kill()
            os.close(main_end)
    assert "helo" in (tmp_path / "pageant" / "chat_history").read_text()


class Guarded(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        opens = self.headers.get("authorization") == "Bearer right"
        self.send_response(200 if opens else 401)
        self.end_headers()
        self.wfile.write(b"up 1\n" if opens else b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def guarded() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        server.shutdown()
        thread.join()


def test_top_asks_once_for_a_key(guarded: str) -> None:
    asked: list[int] = []

    def ask() -> str:
        asked.append(1)
        return "right"

    reader = MetricsReader(guarded, "wrong", ask=ask)
    assert reader.read().total("up") == reader.read().total("up") == 1.0
    assert len(asked) == 1


def test_top_says_how_a_key_is_given(guarded: str) -> None:
    result = CliRunner().invoke(main, ["top", "--url", guarded, "--once"])
    assert result.exit_code == 1 and "401" in result.output and "--api-key" in result.output
    with pytest.raises(OSError, match="401"):
        MetricsReader(guarded, "", ask=lambda: "wrong too").read()


def test_a_queue_of_less_than_a_millisecond_is_told_apart() -> None:
    def median(wait: float) -> str:
        meter = RequestMeter("tiny")
        for _ in range(100):
            meter.observe("queue", wait)
        return seconds(
            View(MetricsSample(exposition(meter).decode(), 1.0), None).quantiles("vllm:request_queue_time_seconds")[0]
        )

    assert [median(wait) for wait in (0.00008, 0.0004, 0.004)] == ["0.05 ms", "0.38 ms", "3.8 ms"]


def test_vllm_s_buckets_are_still_there() -> None:
    """Its dashboards read them; buckets are added only."""
    meter = RequestMeter("tiny")
    meter.observe("queue", 1.0)
    text = exposition(meter).decode()
    for bound in ("0.3", "0.5", "1.0", "60.0", "7680.0"):
        assert f'le="{bound}"' in next(
            line for line in text.splitlines() if "request_queue_time_seconds_bucket" in line and f'"{bound}"' in line
        )


def test_click_is_what_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click, "prompt", lambda text, hide_input, err: "typed" if hide_input and err else "shown")
    from services.cli.display.top import ask_key

    assert ask_key() == "typed"
