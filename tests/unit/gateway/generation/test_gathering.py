"""Whether a client reads output as it comes or at its end is known to the scheduler, from every front."""

from __future__ import annotations

from typing import Any

import pytest

from protos.pageant.v1 import inference_pb2
from tests.unit.gateway.http.client import http
from tests.unit.gateway.troupe import LAST, front

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": True}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
    ],
)
async def test_a_whole_answer_is_gathered_and_a_stream_is_not(
    path: str, body: dict[str, Any], stream: dict[str, bool]
) -> None:
    async with http() as h:
        asked = h.post(path, body | stream)
        request = await h.troupe.request()
        assert request.header.is_gathered is not stream.get("stream", False)
        h.troupe.say(request, "Yes", **LAST)
        assert (await asked).status_code == 200


@pytest.mark.parametrize("gather", [False, True])
async def test_a_grpc_client_says_so(*, gather: bool) -> None:
    async with front() as f:
        options = inference_pb2.StreamOptions(gather=gather)
        call = f.inference.Generate(inference_pb2.GenerateRequest(text="x", stream=options))
        request = await f.troupe.request()
        assert request.header.is_gathered is gather
        f.troupe.say(request, "bye", **LAST)
        assert [response.text async for response in call] == ["bye"]
