"""The page's document and the policy under which a browser shows it; tests/system/test_page.py looks at it in one."""

from __future__ import annotations

import base64
import hashlib
import re

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
