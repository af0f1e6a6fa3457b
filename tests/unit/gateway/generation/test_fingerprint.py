"""What clients are told of what computed their output, and what a gateway does so that it does not change."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from protos.pageant.v1.inference_pb2 import GenerateRequest, ListModelsRequest
from shared.messages import Fingerprint, Heartbeat, Hello
from tests.unit.gateway.generation.test_resume import replace_scheduler, rest
from tests.unit.gateway.http.client import http
from tests.unit.gateway.troupe import LAST, Front, front, until

ONE, TWO = Fingerprint(dtype="float32"), Fingerprint(dtype="bfloat16")
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "Hi"}}


@pytest.mark.parametrize("path", BODIES)
async def test_http_answers_name_the_worker_s(path: str) -> None:
    async with http() as h:
        asked = h.post(path, BODIES[path])
        h.troupe.say(await h.troupe.request(), "there", fingerprint=ONE.name, **LAST)
        assert (await asked).json()["system_fingerprint"] == ONE.name


@pytest.mark.parametrize("path", BODIES)
async def test_so_does_every_event_of_a_stream(path: str) -> None:
    async with http() as h:
        asked = h.post(path, BODIES[path] | {"stream": True, "stream_options": {"include_usage": True}})
        request = await h.troupe.request()
        h.troupe.say(request, "over", fingerprint=ONE.name)
        h.troupe.say(request, " there", at=(1, 4), **LAST)
        lines = [line for line in (await asked).text.splitlines() if line.startswith("data: {")]
        assert len(lines) > 1 and all(f'"system_fingerprint":"{ONE.name}"' in line for line in lines)


async def test_grpc_says_it_too() -> None:
    async with front() as f:
        await announce(f, ONE, TWO)
        call = f.inference.Generate(GenerateRequest(text="Once"))
        f.troupe.say(await f.troupe.request(), "there", fingerprint=TWO.name, **LAST)
        assert [response.system_fingerprint for response in await rest(call)] == [TWO.name]
        (model,) = (await f.inference.ListModels(ListModelsRequest())).models
        assert model.system_fingerprint == ",".join(sorted((ONE.name, TWO.name)))


async def announce(f: Front, *fingerprints: Fingerprint) -> None:
    f.troupe.fingerprints = list(fingerprints)
    f.troupe.announce()
    await until(lambda: f.troupe.gateway.roster.fingerprints == list(fingerprints))


async def test_the_next_scheduler_is_told_what_is_alive() -> None:
    async with front() as f:
        await announce(f, ONE)
        call = f.inference.Generate(GenerateRequest(text="Once"))
        request = await f.troupe.request()
        assert request.fingerprint == "" and f.troupe.gateway.alive() == []
        f.troupe.say(request, "a", fingerprint=ONE.name)
        await call.read()
        while not (heartbeat := await f.troupe.get(f.troupe.scheduler, Heartbeat)).alive:
            pass
        assert heartbeat.alive == [ONE.name]
        f.troupe.fingerprints = []  # the new one knows of no worker yet
        f.troupe.epoch += 1
        f.troupe.announce("gateway-test", "worker-a")
        while not (hello := await f.troupe.get(f.troupe.scheduler, Hello)).alive:
            pass
        assert hello.alive == [ONE]
        f.troupe.announce()
        again = await f.troupe.request()
        assert again.is_resumed and again.fingerprint == ONE.name
        f.troupe.say(again, "a b", **LAST)
        assert "".join(response.text for response in await rest(call)) == " b"
        assert f.troupe.gateway.alive() == []


async def test_what_is_alive_is_known_longer_than_its_workers() -> None:
    """Later rosters name others or none; the gateway still tells the next scheduler the fingerprints of its streams."""
    async with front() as f:
        await announce(f, ONE)
        call = f.inference.Generate(GenerateRequest(text="Once"))
        request = await f.troupe.request()
        f.troupe.say(request, "a", fingerprint=ONE.name)
        await call.read()
        await announce(f, TWO)
        assert f.troupe.gateway.alive() == [ONE]
        await announce(f)
        assert f.troupe.gateway.alive() == [ONE]
        f.troupe.say(request, "b", at=(1, 1), **LAST)
        await rest(call)
        assert f.troupe.gateway.alive() == []


async def test_a_begun_stream_waits_for_its_own_kind() -> None:
    async with front() as f:
        await announce(f, ONE)
        call = f.inference.Generate(GenerateRequest(text="Once"))
        f.troupe.say(await f.troupe.request(), "a", fingerprint=ONE.name)
        await call.read()
        f.troupe.fingerprints = [TWO]
        replace_scheduler(f)
        await until(lambda: bool(f.troupe.gateway.generation.recovery.paused))
        await announce(f, TWO)
        assert f.troupe.gateway.generation.recovery.paused, "another kind is no help"
        await announce(f, TWO, ONE)
        again = await f.troupe.request()
        f.troupe.say(again, "a b", **LAST)
        await rest(call)
        assert await call.code() is grpc.StatusCode.OK


async def test_it_does_not_wait_for_ever() -> None:
    async with front(resume_timeout=0.2) as f:
        await announce(f, ONE)
        call = f.inference.Generate(GenerateRequest(text="Once"))
        f.troupe.say(await f.troupe.request(), "a", fingerprint=ONE.name)
        await call.read()
        f.troupe.fingerprints = [TWO]
        replace_scheduler(f)
        while await f.troupe.get(f.troupe.scheduler, Heartbeat):
            f.troupe.announce()
            if call.done():
                break
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert ONE.name in await call.details() and TWO.name in await call.details()
