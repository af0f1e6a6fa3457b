"""What a web page of another origin can do in a visitor's browser: nothing that it was not allowed."""

from __future__ import annotations

import asyncio
import itertools
import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from shared.config import load_settings
from shared.errors import ConfigError
from shared.exposure import KEYS_ADVICE, is_loopback
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.troupe import LAST, front

ASK: dict[str, Any] = {"prompt": "Once", "max_tokens": 4}
SIMPLE = (  # what browsers let any page send, and what looks like JSON and is not
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain;application/json",
    "application/jsonp", "application/json, text/plain", "", None,
)  # fmt: skip
ORIGIN = "https://chat.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def routes_of(h: Http, method: str) -> list[str]:
    server = h.troupe.gateway.http
    assert server is not None
    app = server._app
    assert isinstance(app, Starlette)
    found = [route.path for route in app.routes if isinstance(route, Route) and method in (route.methods or ())]
    assert found
    return [path.replace("{name:path}", "tiny") for path in found]


OTHER_BODIES = {"/v1/files", "/v1/batches/{batch_id}/cancel", "/ping"}  # a form, and none


async def test_no_endpoint_reads_a_body_that_is_not_said_to_be_json() -> None:
    async with http() as h:
        assert set(routes_of(h, "POST")) >= OTHER_BODIES
        posts = [path for path in routes_of(h, "POST") if path not in OTHER_BODIES]
        assert len(posts) >= 7
        for path, kind in itertools.product(posts, SIMPLE):
            headers = {} if kind is None else {"content-type": kind}
            response = await h.client.post(path, content=b'{"prompt": "Once"}', headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (415, "content-type"), (path, kind)
            assert "content-type: application/json" in error["message"]
        assert not len(h.troupe.gateway.generation.journal)


async def test_no_page_of_another_origin_posts_anything_without_asking_first(tmp_path: Path) -> None:
    async with http(files_dir=str(tmp_path)) as h:
        posts = [path for path in routes_of(h, "POST") if path != "/ping"]  # which reads nothing and changes nothing
        for path, kind in itertools.product(posts, SIMPLE):
            headers = {"origin": ORIGIN} if kind is None else {"content-type": kind, "origin": ORIGIN}
            response = await h.client.post(path, content=b"--x--", headers=headers)
            assert response.status_code == (403 if path in OTHER_BODIES else 415), (path, kind)


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"])
async def test_json_with_its_parameters_is_read(kind: str) -> None:
    async with http() as h:
        asked = h.post("/v1/completions", ASK, **{"content-type": kind})
        h.troupe.say(await h.troupe.request(), "fine", **LAST)
        assert (await asked).status_code == 200


OURS = ("localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9", "127.9.9.9", "[::1]", "[::1]:8000",
        "chat.localhost", "localhost.")  # fmt: skip
NOT_OURS = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost",
            "192.168.1.5", "0.0.0.0", "[2001:db8::1]:8000", "localhost@evil.example", "evil.example#localhost",
            "localhost:8000:80", "")  # fmt: skip


async def test_a_server_on_loopback_alone_answers_to_loopback_names_alone() -> None:
    async with http() as h:
        for name in OURS:
            assert (await h.client.get("/version", headers={"host": name})).status_code == 200, name
        for path, name in itertools.product([*routes_of(h, "GET"), "/v1/nothing"], NOT_OURS):
            response = await h.client.get(path, headers={"host": name})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["type"]) == (403, "host", "permission_error"), name
            assert "allowed_hosts" in error["message"]
        response = await h.post("/v1/completions", ASK, host="evil.example")
        assert response.status_code == 403 and not len(h.troupe.gateway.generation.journal)


async def test_two_hosts_or_none_are_refused() -> None:
    async with http() as h:
        port = h.client.base_url.port
        for hosts in (b"", b"host: localhost\r\nhost: evil.example\r\n"):

            def send(hosts: bytes = hosts) -> bytes:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                    connection.sendall(b"GET /version HTTP/1.1\r\n" + hosts + b"\r\n")
                    return connection.recv(100)

            assert (await asyncio.to_thread(send)).startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 "))


async def test_other_names_can_be_allowed() -> None:
    async with http(allowed_hosts="chat.example, *.lan, 192.168.1.5, [fd00::5]") as h:
        names = ("chat.example:80", "CHAT.example", "box.lan", "192.168.1.5:8000", "[fd00::5]:8000", "localhost")
        for name in names:
            assert (await h.client.get("/health", headers={"host": name})).status_code == 200, name
        for name in ("evil.example", "lan", "a.chat.example", "fakelan"):
            assert (await h.client.get("/health", headers={"host": name})).status_code == 403, name
    async with http(allowed_hosts="*") as h:
        assert (await h.client.get("/health", headers={"host": "evil.example"})).status_code == 200


async def test_a_server_that_others_reach_answers_to_any_name_and_suggests_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with http(host="0.0.0.0") as h:
        assert (await h.client.get("/health", headers={"host": "gateway:8000"})).status_code == 200
    assert KEYS_ADVICE in capsys.readouterr().out
    for closed in ({"host": "127.0.0.1"}, {"host": "0.0.0.0", "api_keys": "acme:correct-horse"}):
        async with front(**closed):
            pass
        assert "no_api_keys" not in capsys.readouterr().out
    async with http(host="0.0.0.0", allowed_hosts="chat.example") as h:
        assert (await h.client.get("/health", headers={"host": "evil.example"})).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_addresses_of_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "192.168.0.1", "gateway", "localhost.example", ""])
def test_addresses_that_others_reach(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_hosts": "http://chat.example"}, {"allowed_hosts": "chat.example:8000"}, {"allowed_hosts": "*.*.x"},
        {"allowed_hosts": "a b"}, {"cors_allow_origins": "chat.example"}, {"cors_allow_origins": "https://x.example/"},
        {"cors_allow_origins": "null"}, {"cors_allow_origins": "https://*.example"},
    ],
)  # fmt: skip
def test_a_setting_that_is_no_host_or_origin_is_refused_by_name(wrong: dict[str, str]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        load_settings(wrong, environ={})


@pytest.mark.parametrize("keys", ["", "acme:correct-horse"])
async def test_without_the_setting_no_page_of_another_origin_is_let_in(keys: str) -> None:
    async with http(api_keys=keys) as h:
        response = await h.client.options("/v1/completions", headers=PREFLIGHT)
        assert response.status_code >= 400
        shown = await h.client.get("/health", headers={"origin": ORIGIN})
        for answer in (response, shown):
            assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize("keys", ["", "acme:correct-horse"])
@pytest.mark.parametrize("origins", [f"http://localhost:3000, {ORIGIN}", "*"])
async def test_a_page_that_is_let_in_asks_first_and_then_with_its_key(keys: str, origins: str) -> None:
    async with http(api_keys=keys, cors_allow_origins=origins) as h:
        expected = "*" if origins == "*" else ORIGIN
        response = await h.client.options("/v1/completions", headers=PREFLIGHT)
        assert response.status_code == 200, "a preflight carries no key"
        assert response.headers["access-control-allow-origin"] == expected
        assert "POST" in response.headers["access-control-allow-methods"]
        allowed = response.headers["access-control-allow-headers"]
        assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-lang"))
        assert "access-control-allow-credentials" not in response.headers
        key = {"authorization": "Bearer correct-horse"} if keys else {}
        asked = h.post("/v1/completions", ASK, origin=ORIGIN, **key)
        h.troupe.say(await h.troupe.request(), "fine", **LAST)
        answer = await asked
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == expected
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await h.post(
            "/v1/completions", ASK | {"n": 0} if not keys else ASK, origin=ORIGIN, **{"x-tenant": "x" * 200}
        )
        assert refused.status_code in (400, 401) and refused.headers["access-control-allow-origin"] == expected


async def test_a_page_that_is_not_named_is_not_let_in() -> None:
    async with http(cors_allow_origins=ORIGIN) as h:
        for other in ("https://evil.example", "http://chat.example", "null", ORIGIN + ".evil.example"):
            response = await h.client.options("/v1/completions", headers=PREFLIGHT | {"origin": other})
            assert response.status_code == 400 and "access-control-allow-origin" not in response.headers
            answer = await h.client.get("/health", headers={"origin": other})
            assert "access-control-allow-origin" not in answer.headers


async def test_the_grpc_port_does_nothing_for_what_a_page_can_send() -> None:
    async with front() as f:
        port = f.troupe.gateway.server.port

        def send() -> bytes:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(
                    b"POST /pageant.v1.Inference/Generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n"
                    b"\x00\x00\x00\x00\x00"
                )
                answer = b""
                while chunk := connection.recv(4096):
                    answer += chunk
                return answer

        assert b"HTTP/1.1 200" not in await asyncio.to_thread(send)
        assert not len(f.troupe.gateway.generation.journal)
