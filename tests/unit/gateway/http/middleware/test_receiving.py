"""Bodies of HTTP requests: counted, bounded, timed, and not read at all from a sender that is in debt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from typing import Any

import pytest
from starlette.types import Message

from services.gateway.access import intake
from services.gateway.access.intake import CREDIT, REFUSED_BYTES_PER_SECOND, SMALL, BodyIntake, IntakeLimits
from services.gateway.http.connection.listener import RECEIVE_BUFFER, listen
from services.gateway.http.middleware import receiving
from services.gateway.http.middleware.receiving import MOST_WHEN_BUSY, Exchange
from shared.messages import EncodeRequest
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.http.connection.test_connections import Raw, raw
from tests.unit.gateway.troupe import LAST, until

MEGABYTE = 1 << 20
REFUSAL = 0.3  # seconds, in the place of the gateway's


@pytest.fixture(autouse=True)
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.access.intake.REFUSAL", REFUSAL)


def post(length: int | None, *headers: str, path: str = "/v1/completions") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", size, *headers, "", "")
    return "\r\n".join(lines).encode()


async def answer(one: Raw) -> tuple[int, dict[str, Any]]:
    """The status and the error of a response after which the connection ends."""
    head, _, body = (await one.rest()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("head", [post(MEGABYTE), post(100), post(None)], ids=["large", "small", "chunked"])
async def test_a_body_that_stops_half_way_ends_with_408_and_holds_nothing(head: bytes) -> None:
    async with http(body_timeout=0.3) as h, raw(h, 1) as (one,):
        one.writer.write(head + (b'5\r\n{"a":\r\n' if b"chunked" in head else b'{"a":'))
        status, error = await answer(one)
        assert (status, error["type"]) == (408, "timeout_error") and "body_timeout" in error["message"]
        assert h.troupe.gateway.intake.num_bytes == 0


async def test_halves_of_bodies_take_no_more_than_they_may_and_others_are_read() -> None:
    limit = 4 * MEGABYTE
    async with http(max_request_bytes=2 * MEGABYTE, max_receiving_bytes=limit, body_timeout=5) as h:
        intake = h.troupe.gateway.intake
        async with raw(h, 12) as many:
            for one in many:
                one.writer.write(post(2 * MEGABYTE) + b" " * (MEGABYTE + MEGABYTE // 2))
            begun = time.monotonic()
            refused = [asyncio.create_task(answer(one)) for one in many]
            await until(lambda: sum(task.done() for task in refused) >= 11)
            assert time.monotonic() - begun >= REFUSAL, "each answer at once would be followed by another body"
            assert intake.num_bytes <= intake.limits.sender == limit // 2
            for task in refused:
                if task.done():
                    status, error = task.result()
                    assert status == 429 and "max_receiving_bytes" in error["message"]
            asked = h.post("/v1/completions", {"prompt": "small"}, **{"x-tenant": "modest"})
            h.troupe.say(await h.troupe.request(), "fine", **LAST)
            assert (await asked).status_code == 200
            for task in refused:
                task.cancel()
        await until(lambda: not intake.num_bytes)


async def test_too_many_bytes_of_all_senders_together_are_503() -> None:
    async with http(max_request_bytes=2 * MEGABYTE, max_receiving_bytes=4 * MEGABYTE) as h, raw(h, 3) as many:
        for number, one in enumerate(many):
            one.writer.write(post(2 * MEGABYTE, f"x-tenant: t{number}") + b" " * (2 * MEGABYTE - 10))
        done, pending = await asyncio.wait(
            [asyncio.create_task(answer(one)) for one in many], timeout=20, return_when=asyncio.FIRST_COMPLETED
        )
        status, error = done.pop().result()
        assert status == 503 and "at this gateway" in error["message"]
        for task in pending:
            task.cancel()


async def test_a_body_that_comes_steadily_is_read_however_long_it_takes() -> None:
    body = json.dumps({"prompt": "x" * 3 * SMALL}).encode()
    async with http(body_timeout=0.5) as h, raw(h, 1) as (one,):
        one.writer.write(post(len(body)))
        for start in range(0, len(body), SMALL // 4):
            one.writer.write(body[start : start + SMALL // 4])
            await asyncio.sleep(0.1)
        request = await h.troupe.request()
        assert request.text == "x" * 3 * SMALL
        h.troupe.say(request, "fine", **LAST)
        assert b"200 OK" in await one.head()


async def test_the_bodies_of_one_sender_come_at_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "FASTEST", 2 * MEGABYTE)
    async with http() as h:
        begun = time.monotonic()
        assert (await h.refusal("/v1/completions", {"prompt": "x" * 2 * MEGABYTE, "model": "other"}))[0] == 404
        assert time.monotonic() - begun > (1 - intake.BURST) / 2, "what would otherwise be there at once"


def in_debt(h: Http, sender: str) -> None:
    h.troupe.gateway.intake.refused(sender, int((CREDIT + 60) * REFUSED_BYTES_PER_SECOND))


async def test_refused_megabytes_put_their_sender_in_debt() -> None:
    async with http() as h:
        body = {"prompt": "x" * (6 * MEGABYTE), "model": "other"}
        for _ in range(3):
            assert (await h.refusal("/v1/completions", body))[0] == 404
        async with raw(h, 1) as (one,):
            one.writer.write(post(6 * MEGABYTE))
            status, error = await answer(one)
            assert status == 429 and "were refused" in error["message"]
        asked = h.post("/v1/completions", {"prompt": "small"})
        h.troupe.say(await h.troupe.request(), "fine", **LAST)
        assert (await asked).status_code == 200, "a small request costs no more than its headers"


def fill(client: socket.socket) -> int:
    """Send until nothing more is taken; how many bytes were."""
    count = 0
    with contextlib.suppress(TimeoutError):
        while True:
            count += client.send(bytes(SMALL))
    return count


def read(connection: socket.socket, count: int) -> None:
    while count:
        count -= len(connection.recv(min(count, SMALL)))


def test_the_kernel_holds_little_of_a_connection_that_is_not_read_on() -> None:
    """By itself the kernel holds megabytes for each connection that is read slowly."""
    with listen("127.0.0.1", 0) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        client.connect(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            reader = threading.Thread(target=read, args=(connection, 32 * MEGABYTE))
            reader.start()
            client.sendall(bytes(32 * MEGABYTE))
            reader.join()
            client.settimeout(0.1)
            assert SMALL < fill(client) < 4 * RECEIVE_BUFFER


@pytest.mark.parametrize("head", [post(31 * MEGABYTE), post(None)], ids=["declared", "chunked"])
async def test_who_is_in_debt_is_refused_before_the_body_is_read(head: bytes) -> None:
    async with http() as h, raw(h, 2) as (one, other):
        in_debt(h, "127.0.0.1 ")
        one.writer.write(head)
        assert (await answer(one))[0] == 429, "of the body not a byte has come"
        other.writer.write(
            post(2 * SMALL, "x-tenant: other") + json.dumps({"prompt": "y" * 2 * SMALL}).encode()[: 2 * SMALL]
        )
        assert b" 400 " in await other.head(), "another's was read to its end, which is no JSON"


async def test_of_who_is_in_debt_nothing_is_read_after_the_refusal_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "refusal_wait", lambda: 0.05)
    async with http() as h, raw(h, 1) as (one,):
        in_debt(h, "127.0.0.1 ")
        debts = h.troupe.gateway.intake.debts
        before = debts.of("127.0.0.1 ")
        one.writer.write(post(31 * MEGABYTE) + b" " * MEGABYTE)
        assert b" 429 " in await one.head()
        with contextlib.suppress(ConnectionError):  # what was not read is thrown away by the kernel
            await one.rest()
        assert debts.of("127.0.0.1 ") < before, "nothing more was put down to it"


@pytest.mark.parametrize(("status", "most"), [(400, 4 * MEGABYTE), (429, MOST_WHEN_BUSY), (503, MOST_WHEN_BUSY)])
async def test_after_an_answer_that_says_too_much_little_more_is_thrown_away(status: int, most: int) -> None:
    counted = BodyIntake(IntakeLimits(8 * MEGABYTE, 4 * MEGABYTE, 1.0))
    body = counted.body("somebody")

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(SMALL), "more_body": True}

    async def send(_: Message) -> None:
        """To a client that sends on for ever."""

    exchange = Exchange(body, receive, send, counted)
    await exchange.send({"type": "http.response.start", "status": status, "headers": []})
    await exchange.send({"type": "http.response.body", "body": b"{}"})
    assert body.num_bytes == most


async def test_without_a_key_that_opens_the_address_pays() -> None:
    async with http(api_keys="acme:correct-horse") as h:
        in_debt(h, "address 127.0.0.1")
        body = {"prompt": "x" * 2 * SMALL}
        assert (await h.post("/v1/completions", body)).status_code == 429
        asked = h.post("/v1/completions", body, authorization="Bearer correct-horse")
        h.troupe.say(await h.troupe.request(), "fine", **LAST)
        assert (await asked).status_code == 200


async def test_questions_to_the_tokenizer_go_through_the_admission() -> None:
    async with http(max_open_reqs=1) as h:
        first = h.post("/tokenize", {"prompt": "Once"}, **{"x-tenant": "acme"})
        _, question = await h.troupe.asked(EncodeRequest)
        assert question.tenant == "acme"
        for path, body in (("/tokenize", {"prompt": "Once"}), ("/detokenize", {"tokens": [5]})):
            response = await h.post(path, body)
            assert response.status_code == 429 and int(response.headers["retry-after-ms"]) > 0
        first.cancel()
