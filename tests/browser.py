"""A headless Chromium, driven by the DevTools protocol over two pipes: no package and no port is needed.

PAGEANT_TEST_BROWSER names a Chromium (chromium, chrome-headless-shell ...) that is not in the path.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome")
BROWSER = os.environ.get("PAGEANT_TEST_BROWSER") or next((found for name in NAMES if (found := shutil.which(name))), "")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
           "--disable-extensions", "--disable-component-update", "--disable-background-networking",
           "--remote-debugging-pipe", "--hide-scrollbars")  # fmt: skip
LAUNCH = """import os, sys
for found, wanted in [(os.dup(int(word)), place) for word, place in zip(sys.argv[1:3], (3, 4))]:
    os.dup2(found, wanted)
    os.set_inheritable(wanted, True)
os.execv(sys.argv[3], sys.argv[3:])"""  # it looks for its pipes at these descriptors
ANSWER_SECONDS = 60
WAIT_SECONDS = 100
KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "ArrowRight": ("ArrowRight", 39, ""),
        "ArrowLeft": ("ArrowLeft", 37, "")}  # fmt: skip


class Chromium:
    """One process; it ends with `close`."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of its profile."""
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        pipes = (str(to_read), str(to_write))
        words = [sys.executable, "-c", LAUNCH, *pipes, BROWSER, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(words, pass_fds=(to_read, to_write), stdout=quiet, stderr=quiet)
        os.close(to_read)
        os.close(to_write)
        self._answers: dict[int, Any] = {}
        self._heard = threading.Condition()
        self._last = 0
        self.events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        waiting = b""
        while data := os.read(self._in, 1 << 16):
            *messages, waiting = (waiting + data).split(b"\0")
            with self._heard:
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append(message)
                self._heard.notify_all()

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        with self._heard:
            assert self._heard.wait_for(lambda: number in self._answers, ANSWER_SECONDS), f"{method}: no answer"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, url: str, width: int = 1100, height: int = 760) -> Tab:
        """A page of its own, which shares nothing with others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        tab = Tab(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"], target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.size(width, height)
        tab.go(url)
        return tab

    def close(self) -> None:
        os.close(self._out)  # it ends when its pipe does
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(20)
        os.close(self._in)


class Tab:
    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = WAIT_SECONDS) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"{script}: not within {seconds:g} s; {self.text('body')[-1500:]}"
            time.sleep(0.05)
        return value

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def reload(self) -> None:
        self.run("window.isOld = true")
        self.call("Page.reload")
        self.until("!window.isOld && document.readyState === 'complete'")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def count(self, selector: str) -> int:
        return int(self.run(f"document.querySelectorAll({selector!r}).length"))

    def attribute(self, selector: str, name: str) -> str | None:
        found: str | None = self.run(f"document.querySelector({selector!r}).getAttribute({name!r})")
        return found

    def value(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({selector!r}).value"))

    def is_visible(self, selector: str) -> bool:
        return bool(self.run(f"document.querySelector({selector!r})?.checkVisibility() ?? false"))

    def wait_for_text(self, selector: str, text: str) -> None:
        self.until(f"(document.querySelector({selector!r})?.innerText ?? '').includes({text!r})")

    def box(self, selector: str) -> dict[str, float]:
        found: dict[str, float] = self.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        return found

    def click(self, selector: str) -> None:
        self._mouse(selector, ("mousePressed", "mouseReleased"), button="left", clickCount=1)

    def hover(self, selector: str, shows: str) -> None:
        """The mouse over an element until what it `shows` is there: what moves beneath the mouse meanwhile hides it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.run(f"document.querySelector({shows!r}) !== null"):
            assert time.monotonic() < deadline, f"{shows}: not within {WAIT_SECONDS} s over {selector}"
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)  # else a second move is none
            self._mouse(selector, ())
            time.sleep(0.2)

    def _mouse(self, selector: str, kinds: tuple[str, ...], **params: Any) -> None:
        self.until(f"document.querySelector({selector!r}) !== null")
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'nearest'}})")
        # The first line of what is broken over two: the middle of both may be beside it.
        box = self.run(f"document.querySelector({selector!r}).getClientRects()[0].toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in kinds:
            self.call("Input.dispatchMouseEvent", type=kind, **place, **params)

    def fill(self, selector: str, text: str) -> None:
        self.run(
            f"""{{ const field = document.querySelector({selector!r}); field.focus(); field.value = {json.dumps(text)};
            for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind, {{ bubbles: true }})); }}"""
        )

    def press(self, key: str) -> None:
        code, number, text = KEYS[key]
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=number, **typed)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def events(self, method: str) -> list[dict[str, Any]]:
        """The parameters of what this page reported."""
        found = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in found if event["method"] == method]

    def requests(self) -> list[dict[str, Any]]:
        """Every request that it made, with its url and, where it has one, its postData."""
        return [event["request"] for event in self.events("Network.requestWillBeSent")]

    def faults(self) -> list[str]:
        """Errors of its scripts and its console; the browser itself reports refused requests, which are none."""
        thrown = [str(event["exceptionDetails"]) for event in self.events("Runtime.exceptionThrown")]
        logged = [event["entry"] for event in self.events("Log.entryAdded") if event["entry"]["level"] == "error"]
        said = [str(event["args"]) for event in self.events("Runtime.consoleAPICalled") if event["type"] == "error"]
        return thrown + said + [entry["text"] for entry in logged if entry["source"] != "network"]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
