"""The page's document, its parts and the policy under which a browser shows them.

tests/system/packages/test_page.py looks at it in a browser.
"""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from typing import Any

import services.gateway.http.page as page
from tests.unit.gateway.http.client import http

IMPORT = re.compile(r"""^import .* from "(\.[^"]+)";$""", re.MULTILINE)
MAX_LINES, MAX_CHARS = 400, 120  # that people read


async def test_the_page_s_own_parts_are_all_that_its_policy_lets_run() -> None:
    async with http(api_keys="acme:correct-horse") as h:
        response = await h.client.get("/")
        assert response.status_code == 200, "the page is what asks for a key"
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script>", response.text), "nothing that the policy would stop"
        named = re.findall(r"(?:src|href)=\"(?!data:)([^\"]+)\"", response.text)
        assert len(named) > 3 and all(path.startswith("/page/") for path in named)
        assert await read(h.client, named) == set(page._parts()) - {"index.html"}, "every part is asked for"
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"


async def read(client: Any, paths: list[str]) -> set[str]:
    """Ask for parts, and for the modules that they import; the names of all."""
    found: set[str] = set()
    while paths:
        path = paths.pop()
        if (name := path.removeprefix("/page/")) in found:
            continue
        response = await client.get(path)
        kind = "text/javascript" if path.endswith(".js") else "text/css"
        assert response.status_code == 200 and response.headers["content-type"].startswith(kind), path
        assert response.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\(|eval\(|innerHTML", response.text), path
        lines = response.text.splitlines()
        assert len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_CHARS, path
        found.add(name)
        paths += [os.path.normpath(f"{path}/../{other}") for other in IMPORT.findall(response.text)]
    return found


async def test_no_other_file_is_a_part_and_a_part_that_is_known_is_not_sent_again() -> None:
    async with http() as h:
        for path in ("page.py", "../page.py", "%2e%2e/page.py", "browser/main.js", "", "style"):
            assert (await h.client.get(f"/page/{path}")).status_code == 404, path
        first = await h.client.get("/page/main.js")
        again = await h.client.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


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
        if tag in ("input", "textarea", "select", "button"):
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
