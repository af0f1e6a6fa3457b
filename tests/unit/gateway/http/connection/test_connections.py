"""Connections of the HTTP front: how many, from where, and how long one may be there without a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway.access.connections import FEWEST, Connections, make_connections, source_of
from services.gateway.http.answers import events
from shared.config import GatewaySettings, load_settings
from shared.errors import ConfigError
from shared.processes import descriptors
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.troupe import LAST, until

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Raw:
    """A connection that says what a test lets it say."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, data: bytes = HEALTH) -> bytes:
        self.writer.write(data)
        return await self.head()

    async def head(self) -> bytes:
        async with asyncio.timeout(10):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def rest(self) -> bytes:
        """What comes until the server closes."""
        async with asyncio.timeout(30):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def raw(h: Http, count: int) -> AsyncIterator[list[Raw]]:
    port = h.client.base_url.port
    made = [Raw(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(count)]
    yield made
    for one in made:
        one.writer.close()
        with contextlib.suppress(OSError):
            await one.writer.wait_closed()


def connections(h: Http) -> Connections:
    assert h.troupe.gateway.http is not None
    return h.troupe.gateway.http.connections


async def test_above_the_most_the_next_is_told_so_and_those_that_are_there_go_on() -> None:
    async with http(max_connections=FEWEST) as h:
        assert connections(h).per_address == FEWEST // 2, "one address never has all"
        async with raw(h, FEWEST // 2) as idle, raw(h, 3) as more:
            for one in more:
                answer = await one.rest()
                head, _, body = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 Service Unavailable") and b"retry-after: 1" in head
                assert "from one address" in json.loads(body)["error"]["message"]
            for one in idle:
                assert (await one.ask()).startswith(b"HTTP/1.1 200")
            assert len(connections(h)) == FEWEST // 2 and connections(h).num_refused == 3
        await until(lambda: not len(connections(h)))
        assert (await h.client.get("/health")).status_code == 200


async def test_a_stream_goes_on_among_connections_that_are_refused() -> None:
    async with http(max_connections=FEWEST) as h:
        asked = h.post("/v1/completions", {"prompt": "Once", "stream": True})
        request = await h.troupe.request()
        h.troupe.say(request, "some")
        async with raw(h, 40) as many:
            for one in many[FEWEST:]:
                assert b"503" in await one.rest()
            h.troupe.say(request, " more", at=(1, 4), **LAST)
            assert " more" in (await asked).text


def test_places_are_counted_in_all_and_by_source() -> None:
    places = Connections(3, 2)
    for source in ("a", "a", "b"):
        assert not places.excess(source)
        places.enter(source)
    assert "3 connections are open" in places.excess("c")
    places.leave("b")
    assert "from one address" in places.excess("a") and not places.excess("c")
    places.leave("a")
    assert not places.excess("a")


def test_few_descriptors_mean_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "limit", lambda: 1024)
    made = make_connections(GatewaySettings())
    assert (made.most, made.per_address) == (448, 224), "both fronts and what is reserved fit in"
    monkeypatch.setattr(descriptors, "limit", lambda: 1 << 16)
    made = make_connections(GatewaySettings(max_connections=100, max_connections_per_address=7))
    assert (made.most, made.per_address) == (100, 7)


def test_a_network_of_64_bits_is_one_client() -> None:
    assert source_of("2001:db8:1:2::5") == source_of("2001:db8:1:2:ffff::9") != source_of("2001:db8:1:3::5")
    assert source_of("::ffff:10.0.0.1") == source_of("10.0.0.1") == "10.0.0.1"
    assert source_of("fe80::1%eth0") == "fe80::" and source_of("unix") == "unix"


async def test_who_never_asks_is_let_go_of_and_who_is_too_slow_is_told_why() -> None:
    async with http(header_timeout=0.3) as h, raw(h, 4) as (silent, slow, half, quick):
        slow.writer.write(b"POST /v1/completions HTT")
        half.writer.write(b"GET /health HTTP/1.1\r\nx-one: 1\r\n")
        assert (await quick.ask()).startswith(b"HTTP/1.1 200")
        assert await silent.rest() == b""
        for one in (slow, half):
            head, _, body = (await one.rest()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 Request Timeout")
            assert json.loads(body)["error"]["type"] == "timeout_error"
        assert b"ok" in await quick.reader.readexactly(len(b'{"status":"ok","reason":""}'))
        await until(lambda: len(connections(h)) == 1)


async def test_one_byte_at_a_time_is_no_way_to_stay() -> None:
    async with http(header_timeout=0.5) as h, raw(h, 1) as (drip,):
        with contextlib.suppress(ConnectionError):
            for byte in b"GET /health HTTP/1.1\r\nx-slow: " + b"a" * 1000:
                drip.writer.write(bytes([byte]))
                await drip.writer.drain()
                await asyncio.sleep(0.02)
                if drip.reader.at_eof():
                    break
        await until(lambda: not len(connections(h)))


async def test_a_request_that_takes_longer_than_its_head_may_is_left_alone() -> None:
    async with http(header_timeout=0.2, idle_timeout=1) as h:
        asked = h.post("/v1/completions", {"prompt": "Once"})
        request = await h.troupe.request()
        await asyncio.sleep(0.8)
        h.troupe.say(request, "late", **LAST)
        assert (await asked).json()["choices"][0]["text"] == "late"


@pytest.mark.parametrize("between", [b"", b"\r\n"])
async def test_an_idle_connection_is_closed_after_a_while(between: bytes) -> None:
    """Also where something comes that is no request yet: that alone stops the server's own timer."""
    async with http(header_timeout=0.5, idle_timeout=1) as h, raw(h, 1) as (one,):
        await one.ask(HEALTH)
        one.writer.write(between)
        assert b'"ok"' in await one.rest()


@pytest.mark.parametrize("name", ["max_connections", "max_connections_per_address", "header_timeout", "idle_timeout"])
def test_limits_are_positive(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=name):
        load_settings(values, environ={})


async def test_a_stream_that_fails_while_its_client_does_not_read_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last event would wait for the reader for ever."""
    monkeypatch.setattr(events, "LAST_SECONDS", 0.2)
    async with http(max_unread_bytes=1 << 20) as h:
        _, writer = await asyncio.open_connection("127.0.0.1", h.client.base_url.port, limit=1 << 10)
        body = json.dumps({"prompt": "Once", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        request = await h.troupe.request()
        assert len(connections(h)) == 1
        piece = "x" * 65536
        for count in range(400):  # 26 MB: far more than sockets take
            h.troupe.say(request, piece, at=(count, count * len(piece)))
            await asyncio.sleep(0)
            if h.troupe.gateway.generation.journal.get(request.header.request_id) is None:
                break
        await until(lambda: not len(connections(h)))
        assert not len(h.troupe.gateway.generation.journal)
        writer.close()
