"""How long an answer may reason, and how many of its tokens were reasoning, over all fronts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from protos.pageant.v1.inference_pb2 import GenerateRequest
from shared.messages import TokenizeRequest
from shared.requests.reasoning import ReasoningTags, ThinkingBudget
from tests.unit.gateway.http.client import Http, events, http, streaming
from tests.unit.gateway.troupe import LAST, failure, front

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = CHAT | {"max_tokens": 50}
BEGIN, END = 1001, 1002


def think(h: Http, request: TokenizeRequest) -> None:
    h.troupe.say(request, "<think>\nhm", token_ids=[BEGIN, 5, 6])
    h.troupe.say(request, "m</think>Yes", at=(3, 10), token_ids=[7, END, 8], **LAST)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", CHAT | {"thinking_token_budget": 3}, "thinking_token_budget"),
        (
            "/v1/chat/completions",
            CHAT | {"chat_template_kwargs": {"thinking_budget": 3}},
            "chat_template_kwargs.thinking_budget",
        ),
        (
            "/v1/messages",
            MESSAGE | {"thinking": {"type": "enabled", "budget_tokens": 3}},
            "thinking.budget_tokens",
        ),
        ("/v1/completions", {"prompt": "x", "thinking_token_budget": 3}, "thinking_token_budget"),
    ],
)
async def test_the_budget_comes_with_the_tags_of_the_format(path: str, body: dict[str, Any], field: str) -> None:
    async with http(reasoning_parser="qwen3") as h:
        asked = h.post(path, body)
        request = await h.troupe.request()
        budget = request.params.thinking
        assert budget is not None and (budget.num_tokens, budget.field) == (3, field)
        assert (budget.tags.begin, budget.tags.ends, budget.tags.forced) == ([BEGIN], [[END]], [END])
        h.troupe.say(request, "x", **LAST)
        assert (await asked).status_code == 200


@pytest.mark.parametrize("value", [-2, 1 << 31, 1.5, "3"])
async def test_what_is_no_budget_is_refused(value: object) -> None:
    async with http(reasoning_parser="qwen3") as h:
        asked = h.post("/v1/chat/completions", CHAT | {"thinking_token_budget": value})
        if isinstance(value, int):  # the tags are known by then
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await h.troupe.request()
        response = await asked
        assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking_token_budget")


async def test_a_budget_is_refused_where_reasoning_has_no_tags() -> None:
    async with http() as h:
        status, error = await h.refusal("/v1/chat/completions", CHAT | {"thinking_token_budget": 3})
        assert (status, error["param"]) == (400, "thinking_token_budget")


async def test_no_limit_is_no_budget() -> None:
    async with http() as h:
        asked = h.post("/v1/chat/completions", CHAT | {"thinking_token_budget": -1})
        request = await h.troupe.request()
        assert request.params.thinking is None
        h.troupe.say(request, "x", **LAST)
        assert "completion_tokens_details" not in (await asked).json()["usage"]


async def test_tokens_of_reasoning_are_counted() -> None:
    async with http(reasoning_parser="qwen3") as h:
        asked = h.post("/v1/chat/completions", CHAT)
        think(h, await h.troupe.request())
        usage = (await asked).json()["usage"]
        assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (6, {"reasoning_tokens": 3})
        asked = h.post("/v1/chat/completions", streaming(CHAT) | {"stream_options": {"include_usage": True}})
        think(h, await h.troupe.request())
        assert events((await asked).text)[-1]["usage"] == usage
        asked = h.post("/v1/responses", {"input": "Hi"})
        think(h, await h.troupe.request())
        assert (await asked).json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("given", [3, -1, None])
async def test_grpc_has_the_budget_too(given: int | None) -> None:
    asked: dict[str, Any] = {} if given is None else {"thinking_token_budget": given}
    inputs: list[dict[str, Any]] = [{"text": "x"}, {"chat": {"messages": [{"role": "user", "content": "x"}]}}]
    async with front(reasoning_parser="deepseek_r1") as f:
        for place, prompt in enumerate(inputs):
            call = f.inference.Generate(GenerateRequest(sampling=asked, **prompt))
            budget = (await f.troupe.request()).params.thinking
            assert (budget is None) == (given != 3)
            if budget is not None:
                is_open = bool(place)  # an answer to a chat begins within reasoning, in this format
                assert budget == ThinkingBudget(ReasoningTags([BEGIN], [[END]], [END]), 3, is_open)
            call.cancel()


@pytest.mark.parametrize(("parser", "given"), [("", 3), ("qwen3", -2)])
async def test_grpc_refuses_what_is_no_budget(parser: str, given: int) -> None:
    async with front(reasoning_parser=parser) as f:
        call = f.inference.Generate(GenerateRequest(text="x", sampling={"thinking_token_budget": given}))
        ending = asyncio.create_task(failure(call))
        if parser:  # the tags are asked for
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await f.troupe.request()
        error = await ending
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(error.trailing_metadata())["error-field"] == "thinking_token_budget"
