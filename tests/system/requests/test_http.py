"""The official openai client against a real troupe: every parameter, sync, async and streaming; the answers' shapes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.system.harness import Troupe, ask, troupe

MODEL = "pageant-stories"
HI: list[Any] = [{"role": "user", "content": "A story about a fox"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    options = [
        "--num-blocks",
        "256",
        "--num-threads",
        "1",
        "--tool-call-parser",
        "hermes",
        "--reasoning-parser",
        "qwen3",
    ]
    with troupe(tmp_path_factory.mktemp("http"), *options) as started:
        yield started


@pytest.fixture(scope="module")
def client(running: Troupe) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def valid(kind: Any, answer: Any) -> Any:
    """The client reads leniently; this is its own model of the answer, checked field by field."""
    return TypeAdapter(kind).validate_python(answer.to_dict())


def complete(client: openai.OpenAI, prompt: Any = "Once upon a time", **more: Any) -> Completion:
    answer = client.completions.create(model=MODEL, prompt=prompt, **({"max_tokens": 12} | more))
    valid(Completion, answer)
    return answer


def chat(client: openai.OpenAI, **more: Any) -> ChatCompletion:
    answer = client.chat.completions.create(model=MODEL, messages=HI, **({"max_tokens": 12} | more))
    valid(ChatCompletion, answer)
    return answer


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    {"frequency_penalty": 0.5, "presence_penalty": -0.5, "seed": 3},
    {"logit_bias": {"281": -100}, "temperature": 0},
    {"n": 3, "seed": 3},
    {"stop": "."},
    {"stop": [".", ","]},
    {"user": "somebody"},
    {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 3}},
    {"extra_body": {"min_tokens": 12, "ignore_eos": True, "stop_token_ids": [15], "skip_special_tokens": False}},
    {"extra_body": {"allowed_token_ids": [281, 15], "bad_words": ["time"], "include_stop_str_in_output": True}},
    {"extra_body": {"speculate": False, "priority": 2, "request_id": "mine", "spaces_between_special_tokens": True}},
]


@pytest.mark.parametrize("given", SAMPLING, ids=range(len(SAMPLING)))
def test_sampling_parameters_whole_and_streamed(client: openai.OpenAI, given: dict[str, Any]) -> None:
    given = {"seed": 11} | given
    if "extra_body" in given and "seed" in given["extra_body"]:
        del given["seed"]
    whole = complete(client, **given)
    assert len(whole.choices) == given.get("n", 1)
    texts = ["" for _ in whole.choices]
    for chunk in client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, stream=True, **given):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices], "the same seed gives the same answer, streamed or not"
    answer = chat(client, **given)
    said = ["" for _ in answer.choices]
    stream: Any = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=12, stream=True, **given)
    for event in stream:
        valid(ChatCompletionChunk, event)
        for one in event.choices:
            said[one.index] += one.delta.content or ""
    assert said == [choice.message.content for choice in answer.choices]


def test_parameters_do_what_they_say(client: openai.OpenAI) -> None:
    plain = complete(client, temperature=0, max_tokens=30)
    assert plain.choices[0].finish_reason == "length" and plain.usage is not None
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (5, 30)
    stopped = complete(client, temperature=0, max_tokens=30, stop=" little")
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == plain.choices[0].text.split(" little")[0]
    included = complete(
        client, temperature=0, max_tokens=30, stop=" little", extra_body={"include_stop_str_in_output": True}
    )
    assert included.choices[0].text == stopped.choices[0].text + " little"
    only = complete(client, temperature=1, extra_body={"allowed_token_ids": [281]})
    assert set(only.choices[0].text.split()) == {"there"} or len(set(only.choices[0].text.split())) == 1
    banned = complete(client, temperature=0, extra_body={"bad_words": ["little"]})
    assert "little" not in banned.choices[0].text
    one, two = (complete(client, seed=seed, temperature=1).choices[0].text for seed in (5, 6))
    assert one != two
    assert complete(client, seed=5, temperature=1).choices[0].text == one


def test_prompts_of_every_kind(client: openai.OpenAI) -> None:
    ids = [0, 414, 438, 262, 388]
    same = [complete(client, prompt, temperature=0).choices[0].text for prompt in ("Once upon a time", ids)]
    assert same[0] == same[1]
    both = complete(client, [ids, [0, 414]], temperature=0)
    assert both.choices[0].text == same[0] and both.choices[1].index == 1
    texts = complete(client, ["Once upon a time", "One day"], temperature=0)
    assert texts.choices[0].text == same[0] and len(texts.choices) == 2
    many = complete(client, ["One day", "Tom and"], n=2, seed=1)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]


def test_echo_logprobs_and_best_of(client: openai.OpenAI) -> None:
    echoed = complete(client, temperature=0, echo=True)
    assert echoed.choices[0].text.startswith("Once upon a time,")
    scored = complete(client, temperature=0, logprobs=3)
    columns = scored.choices[0].logprobs
    assert columns is not None and columns.tokens and columns.top_logprobs and columns.token_logprobs
    assert "".join(columns.tokens) == scored.choices[0].text
    assert all(
        len(top) == 3 and max(top.values()) == own
        for top, own in zip(columns.top_logprobs, columns.token_logprobs, strict=True)
    )
    raw = client.completions.create(
        model=MODEL, prompt="Once upon a time", echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    whole = raw.choices[0].logprobs
    assert whole is not None and whole.tokens is not None and whole.token_logprobs is not None
    assert raw.choices[0].text == "Once upon a time" == "".join(whole.tokens[1:])
    first, *others = list[Any](whole.token_logprobs)
    assert first is None and all(logprob <= 0 for logprob in others)
    best = complete(client, best_of=4, n=2, seed=2, temperature=1)
    assert len(best.choices) == 2


def test_token_ids_and_prompt_logprobs(client: openai.OpenAI) -> None:
    answer: Any = complete(client, temperature=0, extra_body={"return_token_ids": True, "prompt_logprobs": 2})
    choice = answer.choices[0]
    assert choice.prompt_token_ids == [0, 414, 438, 262, 388] and len(choice.token_ids) == 12
    assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == 5
    talk: Any = chat(client, temperature=0, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
    entries = talk.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == talk.choices[0].message.content
    assert bytes(b for entry in entries for b in entry.bytes).decode() == talk.choices[0].message.content
    assert len(talk.choices[0].token_ids) == len(entries) == 12 and talk.prompt_token_ids


def test_usage_at_the_end_of_a_stream(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(
        model=MODEL, prompt="One day", max_tokens=6, stream=True, stream_options=options
    )
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 6
    assert all(isinstance(chunk.usage, CompletionUsage) for chunk in chunks)
    *events, end = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    assert end.usage is not None and end.usage.completion_tokens == 6 and all(event.usage is None for event in events)


def test_messages_and_tools(client: openai.OpenAI) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    for choice in ("auto", "none"):
        given: Any = {"messages": messages, "tools": [TOOL], "tool_choice": choice, "max_completion_tokens": 8}
        answer = client.chat.completions.create(model=MODEL, **given)
        valid(ChatCompletion, answer)
        assert answer.usage is not None and answer.usage.completion_tokens <= 8
    named: Any = {"type": "function", "function": {"name": "weather"}}
    forced = chat(client, tools=[TOOL], tool_choice=named, parallel_tool_calls=False)
    (made,) = forced.choices[0].message.tool_calls or []
    assert made.type == "function" and made.function.name == "weather"
    demanded = chat(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_completion_tokens=120)
    (made,) = demanded.choices[0].message.tool_calls or []
    assert made.type == "function" and made.function.name == "weather"
    if demanded.choices[0].finish_reason != "length":
        assert isinstance(json.loads(made.function.arguments), dict)


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="A story", instructions="Be brief.", max_output_tokens=10)
    valid(Response, answer)
    assert answer.output_text and answer.status == "incomplete" and answer.usage is not None
    assert answer.usage.output_tokens == 10
    text = ""
    for event in client.responses.create(model=MODEL, input=HI, max_output_tokens=10, stream=True, temperature=0):
        valid(ResponseStreamEvent, event)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert event.type == "response.incomplete" and event.response.output_text == text != ""


def explained(answer: Any) -> list[dict[str, Any]]:
    """What it says of its time; each entry is whole."""
    found: list[dict[str, Any]] = (answer.model_extra or {}).get("explanations") or []
    for one in found:
        assert one["cause"] and one["num_chunks"] >= 1 and sum(one["misses"].values()) >= 1
        assert {"prefill", "decode"} <= set(one["phases"]) and all(ms > 0 for ms in one["phases"].values())
    return found


def logged(running: Troupe, label: str) -> dict[str, Any]:
    """The line that ends the request that its client gave this name.  Lines are written a little later."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = [line for line in running.logs() if "request_id" in line]
        named = {line["request_id"] for line in lines if line.get("label") == label}
        for line in lines:
            if line["event"] == "request_finished" and line["request_id"] in named:
                return line
        time.sleep(0.05)
    raise AssertionError(f"no line says that {label} has ended")


# What goes on while the last words are written to the client, after it was told.
LAST_PHASES = {"gateway", "client_blocked"}


def test_where_the_time_went(running: Troupe, client: openai.OpenAI) -> None:
    """For every endpoint, whole and streamed, with several prompts and beams: the client is told what the log
    says but for the end of it; the phases add up in the log, and what is told is no more than the client waited."""
    sampled: Any = {"max_tokens": 20, "seed": 1}
    streamed: Any = sampled | {"stream": True}
    usage: Any = streamed | {"stream_options": {"include_usage": True}}
    beams: Any = {"use_beam_search": True, "beam_width": 3}
    ask_completion, ask_chat, ask_response = client.completions, client.chat.completions, client.responses
    asked: dict[str, Any] = {
        "completion": lambda given: [ask_completion.create(prompt="One day", **sampled, **given)],
        "streamed": lambda given: list(ask_completion.create(prompt="One day", **streamed, **given)),
        "streamed with usage": lambda given: list(ask_completion.create(prompt="One day", **usage, **given)),
        "beams": lambda given: [ask_completion.create(prompt="One day", n=2, max_tokens=12, **given)],
        "chat": lambda given: [ask_chat.create(messages=HI, **sampled, **given)],
        "streamed chat": lambda given: list(ask_chat.create(messages=HI, **usage, **given)),
        "response": lambda given: [ask_response.create(input="A story", max_output_tokens=20, **given)],
        "streamed response": lambda given: list(
            ask_response.create(input="A story", max_output_tokens=20, stream=True, **given)
        ),
    }
    for name, ask_it in asked.items():
        more = {"explain": True, "request_id": name} | (beams if name == "beams" else {})
        began = time.perf_counter()
        *early, last = ask_it({"model": MODEL, "extra_body": more})
        waited = 1000 * (time.perf_counter() - began)
        assert not any(explained(getattr(one, "response", one)) for one in early)
        (told,) = explained(getattr(last, "response", last))
        line = logged(running, name)
        assert line["e2e_ms"] - 15 < sum(line["phases"].values()) < line["e2e_ms"] + 2, (
            "the line is written a little later"
        )
        assert sum(told["phases"].values()) <= min(waited, line["e2e_ms"]) + 2
        for phase in (told["phases"].keys() | line["phases"].keys()) - LAST_PHASES:
            assert told["phases"].get(phase) == pytest.approx(line["phases"].get(phase), abs=0.01), (name, phase)
    given: Any = {"model": MODEL, "extra_body": {"explain": True}}
    two: Any = client.completions.create(prompt=["One day", "Tom and"], **sampled, **given)
    assert len(explained(two)) == 2
    assert not explained(complete(client)) and not explained(chat(client))


def test_a_streamed_chat_tells_of_its_prompt_first(client: openai.OpenAI) -> None:
    more: Any = {"extra_body": {"prompt_logprobs": 1, "return_token_ids": True}, "max_tokens": 4, "temperature": 0}
    whole: Any = client.chat.completions.create(model=MODEL, messages=HI, **more)
    first, *others = client.chat.completions.create(model=MODEL, messages=HI, **more, stream=True)
    assert first.model_extra["prompt_logprobs"] == whole.model_extra["prompt_logprobs"]
    assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    assert not any("prompt_logprobs" in (one.model_extra or {}) for one in others)


def test_prompts_are_cut_and_chats_go_on(client: openai.OpenAI) -> None:
    cut: Any = complete(client, temperature=0, extra_body={"truncate_prompt_tokens": 2, "return_token_ids": True})
    assert cut.choices[0].prompt_token_ids == [262, 388]
    messages: list[Any] = [*HI, {"role": "assistant", "content": "Once upon a"}]
    more: Any = {"extra_body": {"continue_final_message": True}, "reasoning_effort": "low", "verbosity": "low"}
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3, temperature=0, **more)
    assert (answer.choices[0].message.content or "").startswith(" time")


def test_an_answer_of_a_format(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(client, response_format=asked, max_tokens=40)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or "")["a"], bool)
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    told = client.responses.create(model=MODEL, input="Say", text=text, max_output_tokens=40)
    valid(Response, told)
    assert isinstance(json.loads(told.output_text)["a"], bool)
    chosen = complete(client, extra_body={"guided_choice": ["yes", "no"]})
    assert chosen.choices[0].text in ("yes", "no")
    matched = complete(client, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}})
    assert matched.choices[0].text.isdecimal() and len(matched.choices[0].text) == 3


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    valid(Model, model)
    assert client.models.retrieve(MODEL).id == model.id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-7")


ERRORS: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
    ({"temperature": 3}, openai.BadRequestError, "temperature"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ({"logprobs": 50}, openai.BadRequestError, "logprobs"),
    ({"prompt": ""}, openai.BadRequestError, "prompt"),
    ({"prompt": [5, 4096]}, openai.BadRequestError, "prompt"),
    ({"prompt": [5] * 2000}, openai.BadRequestError, "prompt"),
    ({"logit_bias": {"4096": 1}}, openai.BadRequestError, "logit_bias"),
    ({"suffix": "end"}, openai.BadRequestError, "suffix"),
    ({"extra_body": {"top_k": -5}}, openai.BadRequestError, "top_k"),
    ({"extra_body": {"guided_json": {}, "guided_regex": "a"}}, openai.BadRequestError, "guided_regex"),
    ({"model": "gpt-7"}, openai.NotFoundError, "model"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("given", "kind", "param"), ERRORS, ids=range(len(ERRORS)))
def test_errors_are_the_client_s_own_exceptions(
    client: openai.OpenAI, given: dict[str, Any], kind: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 4, "stream": stream} | given
        client.completions.create(**asked)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


async def test_many_at_once_and_the_same_through_grpc(running: Troupe) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

        async def streamed(seed: int) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt="One day", max_tokens=40, seed=seed, temperature=1, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(streamed(seed) for seed in range(16)))
    requests = [ask("One day", max_tokens=40, seed=seed, temperature=1.0) for seed in range(16)]
    assert texts == [answer.text for (answer,) in await asyncio.to_thread(running.generate, requests)]


def test_a_client_that_goes_away_leaves_nothing_behind(running: Troupe, client: openai.OpenAI) -> None:
    before = running.settled_load()
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while (load := running.settled_load()).num_aborted == before.num_aborted:
        assert time.monotonic() < deadline
    worker = load.workers[0]
    assert load.num_open_streams == 0
    assert worker.num_free_blocks + worker.num_cached_blocks == worker.num_blocks
