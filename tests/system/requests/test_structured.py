"""Formats of the output through real processes, with drafts: whole, streamed, several, in chats, in calls, refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from scripts.bench.misuse.hostile import hostile
from shared.client import CallError, Client
from tests.system.harness import ROOT, Troupe, troupe

MODEL = "pageant-stories"
HI: list[Any] = [{"role": "user", "content": "A story about a fox"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                                                   "required": ["city"], "additionalProperties": False}},
}  # fmt: skip
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"enum": [{}]}}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    draft = ROOT / "models" / "pageant-stories-draft"
    options = ["--num-threads", "1", "--tool-call-parser", "hermes", "--draft", str(draft), "--num-draft-tokens", "3"]
    with troupe(tmp_path_factory.mktemp("structured"), *options) as started:
        yield started


@pytest.fixture(scope="module")
def client(running: Troupe) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_a_schema_several_times_whole_and_streamed(client: openai.OpenAI) -> None:
    given: Any = {"model": MODEL, "messages": HI, "response_format": FORMAT, "n": 3, "seed": 5, "max_tokens": 100}
    whole = client.chat.completions.create(**given)
    assert len(whole.choices) == 3
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        person = json.loads(choice.message.content or "")
        assert set(person) == {"name", "age"} and len(person["name"]) <= 10 and person["age"] <= 99
    said = ["", "", ""]
    for event in client.chat.completions.create(stream=True, **given):
        for one in event.choices:
            said[one.index] += one.delta.content or ""
    assert said == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"guided_regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["the fox", "the hen"]}, "the fox|the hen"),
        ({"guided_grammar": 'root ::= "<" [a-z] [a-z] ">"'}, "<[a-z]{2}>"),
        ({"structured_outputs": {"regex": "(yes|no)!"}, "ignore_eos": True, "min_tokens": 40}, "(yes|no)!"),
    ],
)
def test_vllm_s_fields(client: openai.OpenAI, given: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=60, seed=seed, extra_body=given)
        assert re.fullmatch(pattern, answer.choices[0].text) and answer.choices[0].finish_reason == "stop"


def test_a_json_object_and_responses(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_object"}
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=30, extra_body={"response_format": form})
    assert answer.choices[0].text.startswith("{")
    text: Any = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    response = client.responses.create(model=MODEL, input="A fox", text=text, max_output_tokens=100)
    assert response.status == "completed" and set(json.loads(response.output_text)) == {"name", "age"}


@pytest.mark.parametrize("parallel", [True, False])
def test_a_demanded_call_fits_its_schema(client: openai.OpenAI, parallel: bool) -> None:
    given: Any = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": parallel}
    for seed in range(4):
        answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=900, seed=seed, **given)
        choice = answer.choices[0]
        calls = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert len(calls) == 1 if not parallel else 1 <= len(calls) <= 16
        for call in calls:
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            assert arguments == {} if call.function.name == "clock" else arguments["city"] in ("Rome", "Oslo")


def test_what_cannot_be_is_named(client: openai.OpenAI) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"type": "object", "dependencies": {"a": ["b"]}}}, "guided_json"),
        ({"guided_regex": "x" * (1 << 20)}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
    ]
    for given, field in bad:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model=MODEL, prompt="x", stream=stream, extra_body=given)
            assert caught.value.param == field and field in caught.value.message


async def test_hostile_ones_end_beside_a_stream_that_goes_on(running: Troupe) -> None:
    """How fast, and what it costs the stream, scripts/bench_structured measures."""
    refused = 0
    async with Client(running.address) as client:
        asked: Any = {"max_tokens": 600, "ignore_eos": True, "seed": 3, "temperature": 1.0}
        quiet = await client.generate("Once upon a time", **asked)
        async with client.stream("Once upon a time", **asked) as stream:
            text, started = "", time.monotonic()
            for grammar in hostile(7).values():
                try:
                    await client.generate("Once", grammar=grammar, max_tokens=4, timeout=30)
                except CallError as error:
                    assert error.field == "grammar", error
                    refused += 1
            async for delta in stream:
                text += delta.text
    assert text == quiet.sequences[0].text
    assert refused >= 8 and time.monotonic() - started < 200
