"""Responses and Messages against a real troupe, by the official clients; a conversation outlives its gateway."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.system.harness import Troupe, troupe

anthropic: Any = pytest.importorskip("anthropic", reason="needs the anthropic package")

MODEL = "pageant-stories"
HI: list[Any] = [{"role": "user", "content": "A story about a fox"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"place": {"enum": ["Oslo", "Rome"]}}, "required": ["place"]}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
TOOL = {"name": "weather", "input_schema": SCHEMA}
ANY = {"type": "any", "disable_parallel_tool_use": True}
SECONDS = 60


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    options = ["--num-blocks", "256", "--num-threads", "1", "--tool-call-parser", "hermes"]
    with troupe(tmp_path_factory.mktemp("messages"), *options) as started:
        yield started


@pytest.fixture
def client(running: Troupe) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def claude(running: Troupe) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_a_function_is_called_and_its_result_read(client: openai.OpenAI) -> None:
    """Whole and streamed are the same, and each is what the client's own models say."""
    given: dict[str, Any] = {"model": MODEL, "input": HI, "tools": [FUNCTION], "tool_choice": "required",
                             "parallel_tool_calls": False, "temperature": 1.0, "extra_body": {"seed": 5}}  # fmt: skip
    whole = client.responses.create(**given)
    TypeAdapter(Response).validate_python(whole.to_dict())
    (call,) = whole.output
    assert call.type == "function_call" and json.loads(call.arguments)["place"] in ("Oslo", "Rome")
    deltas, last = "", None
    for event in client.responses.create(**given, stream=True):
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
        if event.type == "response.function_call_arguments.delta":
            deltas += event.delta
        last = event
    assert deltas == call.arguments and last is not None and last.type == "response.completed"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    stateless = client.responses.create(
        model=MODEL, input=[*HI, call.to_dict(), output], max_output_tokens=12, temperature=0
    )
    stored = client.responses.create(
        model=MODEL, input=[output], previous_response_id=whole.id, max_output_tokens=12, temperature=0
    )
    assert stateless.output_text == stored.output_text
    assert stateless.usage and stored.usage and stateless.usage.input_tokens == stored.usage.input_tokens


def test_messages_are_those_of_a_chat(client: openai.OpenAI, claude: Any) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=30, temperature=0)
    message = claude.messages.create(model=MODEL, messages=HI, max_tokens=30, extra_body={"temperature": 0})
    assert message.content[0].text == chat.choices[0].message.content and message.stop_reason == "max_tokens"
    with claude.messages.stream(model=MODEL, messages=HI, max_tokens=30, extra_body={"temperature": 0}) as stream:
        assert stream.get_final_message().content[0].text == message.content[0].text
    assert chat.usage is not None
    usage, count = message.usage, claude.messages.count_tokens(model=MODEL, messages=HI).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens == count
    used = claude.messages.create(model=MODEL, messages=HI, max_tokens=60, tools=[TOOL], tool_choice=ANY)
    assert used.content[0].input["place"] in ("Oslo", "Rome") and used.stop_reason == "tool_use"


def test_a_prompt_s_beginning_is_read_from_the_cache(claude: Any) -> None:
    long = [{"role": "user", "content": "A story about a fox and an owl. " * 20}]
    usages = [claude.messages.create(model=MODEL, messages=long, max_tokens=2).usage for _ in range(2)]
    assert usages[1].cache_read_input_tokens > usages[0].cache_read_input_tokens
    assert usages[0].input_tokens + usages[0].cache_read_input_tokens == (
        usages[1].input_tokens + usages[1].cache_read_input_tokens
    )


def test_a_conversation_outlives_its_gateway(running: Troupe, client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "max_output_tokens": 10, "temperature": 0}
    first = client.responses.create(input="Once", **given)
    expected = client.responses.create(input="And?", previous_response_id=first.id, **given).output_text
    (gateway,) = running.pids("gateway")
    os.kill(gateway, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            again = client.responses.create(input="And?", previous_response_id=first.id, **given)
            break
        except (openai.APIConnectionError, openai.InternalServerError):
            time.sleep(0.1)
    assert running.pids("gateway") != [gateway] and again.output_text == expected
    assert client.responses.retrieve(first.id).output_text == first.output_text
