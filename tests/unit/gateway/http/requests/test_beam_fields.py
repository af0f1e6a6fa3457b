"""Beam search in bodies and in gRPC: what of it reaches the troupe."""

from __future__ import annotations

from typing import Any

import pytest

from protos.pageant.v1 import inference_pb2
from services.gateway.access.limits import tokens_of
from services.gateway.grpc.convert import sampling_from_proto
from shared.requests.beam import Beam, EarlyStopping
from tests.unit.gateway.http.client import http
from tests.unit.gateway.troupe import LAST

ASK: dict[str, Any] = {"prompt": "Once", "max_tokens": 4, "use_beam_search": True}


@pytest.mark.parametrize(
    ("given", "beam", "n"),
    [
        ({}, Beam(1), 1),
        ({"n": 4}, Beam(4), 4),  # as vLLM reads it
        ({"n": 2, "best_of": 5}, Beam(5), 2),
        ({"best_of": 5}, Beam(5), 1),
        ({"n": 2, "beam_width": 6, "length_penalty": 0.5}, Beam(6, 0.5), 2),
        ({"beam_width": 3, "early_stopping": True}, Beam(3, 1.0, EarlyStopping.FIRST), 1),
        ({"beam_width": 3, "early_stopping": False}, Beam(3, 1.0, EarlyStopping.LIKELY), 1),
        ({"beam_width": 3, "early_stopping": "never"}, Beam(3, 1.0, EarlyStopping.NEVER), 1),
    ],
)
async def test_a_completion_s_search(given: dict[str, Any], beam: Beam, n: int) -> None:
    async with http() as h:
        asked = h.post("/v1/completions", ASK | given)
        request = await h.troupe.request()
        assert (request.params.beam, request.params.n) == (beam, n)
        for index in range(n):
            h.troupe.say(request, f"upon a{index}", index=index, **LAST)
        choices = (await asked).json()["choices"]
        assert [choice["text"] for choice in choices] == [f"upon a{index}" for index in range(n)]


async def test_a_chat_s_search() -> None:
    async with http() as h:
        body = {"messages": [{"role": "user", "content": "Hi"}], "use_beam_search": True, "beam_width": 3, "n": 2}
        asked = h.post("/v1/chat/completions", body)
        request = await h.troupe.request()
        assert (request.params.beam, request.params.n) == (Beam(3), 2)
        for index in range(2):
            h.troupe.say(request, "Hello", index=index, **LAST)
        assert len((await asked).json()["choices"]) == 2
        assert tokens_of(request, 100, 64) == 3 * 99 + 1, "a search counts with all that it follows"


def test_grpc_s_search() -> None:
    given = inference_pb2.BeamSearch(width=5, length_penalty=0.0, early_stopping=inference_pb2.EARLY_STOPPING_NEVER)
    proto = inference_pb2.SamplingParams(n=2, beam_search=given)
    assert sampling_from_proto(proto).beam == Beam(5, 0.0, EarlyStopping.NEVER)
    assert sampling_from_proto(inference_pb2.SamplingParams(beam_search={"width": 2})).beam == Beam(2)
    assert sampling_from_proto(inference_pb2.SamplingParams()).beam is None
