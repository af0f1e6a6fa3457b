"""What the clients of a soak do: one visit is one request of one tenant, of one of many kinds, well-behaved or not.

Every visit ends by itself, and may end in a refusal: what is measured is what stays behind in the services.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import httpx2

from protos.pageant.v1 import inference_pb2
from scripts.bench.chaos.cases import OPENINGS, PERSON
from scripts.bench.common.clients import ClientConnections

NUM_CHANNELS = 4
TIMEOUT = 60.0  # seconds, of one request
ALL = 1 << 30  # messages
NAMES = ("Lily", "Tom", "Max", "Mia", "Ben", "Sue", "Tim", "Amy")
UNEXPECTED = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
HTTP_ERRORS = (httpx2.HTTPError, httpx2.StreamError)


class Doors(ClientConnections):
    """The ways into one deployment: a few gRPC connections and a pool of HTTP ones."""

    def __init__(self, address: str, http_port: int) -> None:
        super().__init__(address, NUM_CHANNELS)
        self.address = address
        self.http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=TIMEOUT)

    async def __aexit__(self, *exception: object) -> None:
        await self.http.aclose()
        await super().__aexit__(*exception)


@dataclass(frozen=True)
class SoakVisit:
    """Of one tenant; all that is chosen is chosen by `rng`, so a seed names the whole soak."""

    doors: Doors
    number: int
    tenant: str
    rng: Random

    @property
    def text(self) -> str:
        """Half of them begin as others do, so that the prefix cache has something of theirs."""
        opening = self.rng.choice(OPENINGS)
        if self.rng.random() < 0.5:
            return opening
        return f"{opening} {' and '.join(self.rng.choices(NAMES, k=self.rng.randint(1, 24)))} number {self.number}"

    def sampling(self, **more: Any) -> dict[str, Any]:
        return {"temperature": 0.8, "seed": self.number, "max_tokens": self.rng.randint(4, 24), **more}

    def request(self, **sampling: Any) -> Any:
        return inference_pb2.GenerateRequest(text=self.text, sampling=self.sampling(**sampling))

    def call(self, method: str, request: Any, timeout: float = TIMEOUT, stub: Any = None) -> Any:
        """A call of one of the gRPC methods."""
        stub = stub or self.rng.choice(self.doors.stubs)
        return getattr(stub, method)(request, timeout=timeout, metadata=(("x-tenant", self.tenant),))

    async def read(self, request: Any, most: int = ALL, *, seconds: float = TIMEOUT, stub: Any = None) -> Any:
        """The first messages of a stream; returns the call, which goes on where there are more."""
        call, count = self.call("Generate", request, seconds, stub), 0
        while count < most and await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # its type hints have no EOF
            count += 1
        return call

    async def post(self, path: str, **body: Any) -> str:
        return _status(await self.doors.http.post(path, json=body, headers={"x-tenant": self.tenant}))

    async def listen(self, most: int, **sampling: Any) -> None:
        """The first lines of a stream of events."""
        body, count = {"prompt": self.text, "stream": True, **self.sampling(**sampling)}, 0
        headers = {"x-tenant": self.tenant}
        async with self.doors.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            async for _ in response.aiter_lines():
                count += 1
                if count > most:
                    return


def _status(response: httpx2.Response) -> str:
    return "" if response.is_success else f"status {response.status_code}"


# -- gRPC


async def stream(visit: SoakVisit) -> None:
    await visit.read(visit.request())


async def siblings(visit: SoakVisit) -> None:
    await visit.read(visit.request(n=visit.rng.randint(2, 4), logprobs=2, prompt_logprobs=1))


async def beams(visit: SoakVisit) -> None:
    request = inference_pb2.GenerateRequest(text=visit.text, sampling={"max_tokens": 6, "n": 2})
    request.sampling.beam_search.width = 2
    await visit.read(request)


async def cancelled(visit: SoakVisit) -> None:
    """Its client goes away in the middle."""
    (await visit.read(visit.request(max_tokens=200), visit.rng.randint(0, 4))).cancel()


async def late(visit: SoakVisit) -> None:
    """Its deadline comes before its end."""
    await visit.read(visit.request(max_tokens=300, ignore_eos=True), seconds=visit.rng.uniform(0.001, 0.2))


async def kept(visit: SoakVisit) -> None:
    """Its client may come back and does, or does not."""
    request = visit.request(max_tokens=40)
    request.idempotency_key = f"key {visit.number}"
    (await visit.read(request, visit.rng.randint(1, 6))).cancel()
    if visit.rng.random() < 0.5:
        await visit.read(request)


async def refused(visit: SoakVisit) -> None:
    await visit.read(visit.request(temperature=visit.rng.choice((-1.0, 3.0))))


async def held_to_format(visit: SoakVisit) -> None:
    """Half of the formats have been seen before, half are new."""
    number = visit.number if visit.rng.random() < 0.5 else visit.rng.randrange(16)
    request = visit.request(max_tokens=48)
    if visit.rng.random() < 0.5:
        properties = {**PERSON["properties"], f"field{number}": {"type": "boolean"}}
        request.sampling.grammar.json_schema = json.dumps({**PERSON, "properties": properties})
    else:
        request.sampling.grammar.regex = rf"([a-z]{{2,8}} ){{3}}{number}\."
    await visit.read(request)


async def hung_up(visit: SoakVisit) -> None:
    """A connection of its own, closed in the middle of a stream."""
    async with ClientConnections(visit.doors.address) as made:
        await visit.read(visit.request(max_tokens=200), 2, stub=made.stubs[0])


async def tokenized(visit: SoakVisit) -> None:
    told = await visit.call("Tokenize", inference_pb2.TokenizeRequest(text=visit.text))
    await visit.call("Detokenize", inference_pb2.DetokenizeRequest(token_ids=told.token_ids))


# -- HTTP


async def embedded(visit: SoakVisit) -> str:
    return await visit.post("/v1/embeddings", input=[visit.text, visit.text])


async def completion(visit: SoakVisit) -> str:
    return await visit.post("/v1/completions", prompt=visit.text, **visit.sampling(logprobs=1))


async def chat(visit: SoakVisit) -> str:
    messages = [{"role": "user", "content": visit.text}]
    return await visit.post("/v1/chat/completions", messages=messages, **visit.sampling())


async def events(visit: SoakVisit) -> None:
    await visit.listen(ALL)


async def left(visit: SoakVisit) -> None:
    """Its client closes the connection in the middle of the events."""
    await visit.listen(visit.rng.randint(0, 4), max_tokens=200)


async def malformed(visit: SoakVisit) -> str:
    """Requests of a client that makes mistakes: no JSON, unknown fields, an unknown path."""
    content = visit.rng.choice(
        (b"{", b'{"prompt": 3}', json.dumps({f"field{visit.number}": 1, "prompt": "x"}).encode())
    )
    path = visit.rng.choice(("/v1/completions", f"/v1/nothing/{visit.number}"))
    headers = {"x-tenant": visit.tenant, "content-type": "application/json"}
    return _status(await visit.doors.http.post(path, content=content, headers=headers))


KINDS: Mapping[Callable[[SoakVisit], Awaitable[str | None]], int] = {  # and how many of a hundred
    stream: 18, siblings: 5, beams: 2, cancelled: 9, late: 6, kept: 6, refused: 6, held_to_format: 8, hung_up: 3,
    tokenized: 4, embedded: 3, completion: 10, chat: 7, events: 6, left: 4, malformed: 3,
}  # fmt: skip


async def make(visit: SoakVisit) -> str:
    """Make one visit; returns its kind and how it ended."""
    (kind,) = visit.rng.choices(list(KINDS), weights=list(KINDS.values()))
    name = kind.__name__.replace("_", " ")
    try:
        return f"{name}: {await kind(visit) or 'came to its end'}"
    except grpc.aio.AioRpcError as error:
        code = error.code()
        return f"{name}: {code.name}{f' ({error.details()})' if code in UNEXPECTED else ''}"
    except HTTP_ERRORS as error:
        return f"{name}: {type(error).__name__}"
