"""The page's document and the policy under which a browser shows it; tests/system/test_page.py looks at it in one."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from tests.unit.gateway.http.client import http


async def test_the_policy_lets_the_page_s_own_script_and_style_run_and_nothing_else() -> None:
    async with http(api_keys="acme:correct-horse") as h:
        response = await h.client.get("/")
    assert response.status_code == 200, "the page is what asks for a key"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert len(text) > 1000
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not re.search(r"\son\w+=|\sstyle=|https?://", response.text), "nothing that the policy would stop"


class Controls(HTMLParser):
    """Notes each control, and what a screen reader would call it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self._label_for = ""
        self._open: list[str] = []  # labels and buttons
        self._labels: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "label":
            self._label_for = given.get("for", "")
            self._open.append("")
        if tag == "button":
            self._open.append("")
        if tag in ("input", "textarea", "button"):
            self.kinds[given["id"]] = given.get("type", tag)
            self.names[given["id"]] = given.get("aria-label", "") or (self._open[-1] if self._open else "")
            self._last = given["id"]

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1] += data.strip()

    def handle_endtag(self, tag: str) -> None:
        if tag in ("label", "button"):
            text = self._open.pop()
            name = self._label_for if tag == "label" and self._label_for else self._last
            self._labels[name] = self._labels.get(name, "") or text
            self._label_for = ""

    def unnamed(self) -> list[str]:
        return [name for name, said in self.names.items() if not (said or self._labels.get(name))]


async def test_every_control_has_a_name_and_the_key_has_a_field_that_hides_it() -> None:
    async with http() as h:
        document = (await h.client.get("/")).text
    found = Controls()
    found.feed(re.sub(r"<(script|style)>.*?</\1>", "", document, flags=re.DOTALL))
    assert not found.unnamed() and len(found.names) > 10
    assert found.kinds["key"] == "password"
    assert re.search(r'id="settings"[^>]*aria-expanded[^>]*aria-controls="aside"', document)
