"""One real troupe, used and abused: what a client sees, what it costs the others, what is left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from shared.client import Client
from tests.system.harness import MODEL, ROOT, Troupe, ask, collect, troupe

MODELS = ("tinystories-656k", "babyllama-361", "babyllama-361-draft")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    options = ["--num-blocks", "256", "--max-num-batched-tokens", "256", "--num-threads", "1"]
    with troupe(tmp_path_factory.mktemp("troupe"), *options) as started:
        yield started


def refused(running: Troupe, request: Any, timeout: float = 30) -> grpc.aio.AioRpcError:
    """The status with which a request fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        running.generate([request], timeout=timeout)
    return caught.value


def test_text_streams_token_by_token(running: Troupe) -> None:
    request = ask("Once upon a time", max_tokens=30, temperature=0.0)
    most, deadline = 0, time.monotonic() + 60
    while most <= 15:  # a gateway that had to wait for a processor, for 0.1 s, sends all in one message
        assert time.monotonic() < deadline, f"30 tokens never came in more than {most} messages"
        ((answer,),) = running.generate([request])
        assert answer.completion_tokens == len(answer.token_ids) == 30
        assert answer.prompt_tokens == 5
        assert "�" not in answer.text
        most = max(most, answer.num_messages)


def test_named_tokens_have_the_log_probabilities_that_they_have_among_the_likeliest(running: Troupe) -> None:
    async def score(**more: Any) -> list[Any]:
        async with Client(running.address) as client:
            answer = await client.generate("Once upon a time", max_tokens=5, temperature=0.0, **more)
            return answer.sequences[0].logprobs

    likeliest = asyncio.run(score(logprobs=6))
    names = [entry.token_id for entry in likeliest[2].top[::2]]
    named = asyncio.run(score(logprobs=0, logprob_token_ids=[*names, names[0]]))
    assert [entry.token for entry in named] == [entry.token for entry in likeliest], "nothing else changes"
    assert all([one.token_id for one in entry.top] == names for entry in named), "each once, in the request's order"
    assert list(named[2].top) == list(likeliest[2].top[::2])


def test_every_line_of_a_request_is_joinable(running: Troupe) -> None:
    running.generate([ask("Once upon a time", max_tokens=3)])
    lines = [line for line in running.logs() if "request_id" in line]
    last = lines[-1]["request_id"]
    mine = [line for line in lines if line["request_id"] == last]
    assert {line["service"] for line in mine} == {"gateway", "tokenizer", "scheduler", "worker", "detokenizer"}
    assert len({line["trace_id"] for line in mine}) == 1
    assert all(len(line["trace_id"]) == 32 for line in mine)
    assert not any("upon a time" in json.dumps(line) for line in running.logs()), "no prompt in the logs"


BAD = [
    (ask(""), "prompt"),
    (ask("x" * 10_000_000), "prompt"),
    (ask(token_ids=[]), "prompt"),
    (ask(token_ids=[5, 4096]), "prompt"),
    (ask(token_ids=[-1]), "prompt"),
    (ask(token_ids=[5] * 1024), "prompt"),
    (ask("a", temperature=float("nan")), "temperature"),
    (ask("a", top_p=float("nan")), "top_p"),
    (ask("a", repetition_penalty=float("inf")), "repetition_penalty"),
    (ask("a", top_k=-5), "top_k"),
    (ask("a", n=100_000), "n"),
    (ask("a", max_tokens=0), "max_tokens"),
    (ask("a", max_tokens=2**31 - 1, min_tokens=-1), "min_tokens"),
    (ask("a", logprobs=2**31 - 1), "logprobs"),
    (ask("a", prompt_logprobs=-1), "prompt_logprobs"),
    (ask("a", logprob_token_ids=[1]), "logprob_token_ids"),
    (ask("a", logprobs=1, logprob_token_ids=[4096]), "logprob_token_ids"),
    (ask("a", logprobs=1, logprob_token_ids=list(range(21))), "logprob_token_ids"),
    (ask("a", stop=[""]), "stop"),
    (ask("a", stop=["y"] * 100_000), "stop"),
    (ask("a", stop_token_ids=[2**31 - 1]), "stop_token_ids"),
    (ask("a", bad_words=["x" * 500_000]), "bad_words"),
    (ask("a", logit_bias={4096: 1.0}), "logit_bias"),
    (ask("a", logit_bias={1: float("nan")}), "logit_bias"),
    (inference_pb2.GenerateRequest(), "input"),
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_by_field(running: Troupe, request_: Any, field: str) -> None:
    error = refused(running, request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (error.details() or "")


def test_bad_input_disturbs_nobody(running: Troupe) -> None:
    healthy = [ask("One day", seed=index, max_tokens=60) for index in range(8)]
    wanted = running.generate(healthy)

    async def mixed() -> tuple[list[Any], list[Any]]:
        async with running.channel() as channel:
            good = [asyncio.create_task(collect(channel, request)) for request in healthy]
            bad = [collect(channel, request) for request, _ in BAD]
            errors = await asyncio.gather(*bad, return_exceptions=True)
            return await asyncio.gather(*good), errors

    answers, errors = asyncio.run(mixed())
    assert all(isinstance(error, grpc.aio.AioRpcError) for error in errors)
    for (answer,), (alone,) in zip(answers, wanted, strict=True):
        assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)
    load = running.settled_load()
    assert load.workers[0].num_free_blocks + load.workers[0].num_cached_blocks == load.workers[0].num_blocks


def test_an_unknown_model_is_not_found(running: Troupe) -> None:
    request = ask("a")
    request.model = "gpt-7"
    error = refused(running, request)
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "pageant-stories" in (error.details() or "")


def test_a_deadline_ends_the_stream_and_frees_its_blocks(running: Troupe) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        running.generate([ask("Once", max_tokens=900, ignore_eos=True)], timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    load = running.settled_load()
    assert load.num_running == 0


def test_a_cancelled_request_frees_its_blocks_within_two_steps(running: Troupe) -> None:
    before = running.settled_load()

    async def cancel() -> None:
        async with running.channel() as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(ask("Once upon a time", max_tokens=900, ignore_eos=True))
            async for _ in call:
                break
            call.cancel()

    asyncio.run(cancel())
    load = running.settled_load()
    assert load.num_aborted == before.num_aborted + 1
    cancelled = [line for line in running.logs() if line.get("event") == "request_aborted"][-1]
    scheduled = cancelled["request_id"]
    assert scheduled
    steps = load.workers[0].num_steps
    time.sleep(0.3)
    assert running.load().workers[0].num_steps == steps, "nothing is computed for it any more"
    assert load.workers[0].num_free_blocks + load.workers[0].num_cached_blocks == load.workers[0].num_blocks


def test_ids_that_are_no_text_come_out_as_replacement_characters(running: Troupe) -> None:
    with grpc.insecure_channel(running.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        texts = {i: stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[i])).text for i in range(100, 260)}
    broken = [token for token, text in texts.items() if text == "\N{REPLACEMENT CHARACTER}"]
    assert broken
    request = ask(token_ids=[broken[0]], max_tokens=20)
    request.sampling.allowed_token_ids.ids.extend(broken)
    ((answer,),) = running.generate([request])
    assert answer.completion_tokens == 20
    assert answer.text


def test_stop_strings_never_show(running: Troupe) -> None:
    whole = running.generate([ask("Once upon a time", max_tokens=60, temperature=0.0)])[0][0].text
    stop = whole[20:26]
    ((answer,),) = running.generate([ask("Once upon a time", max_tokens=60, temperature=0.0, stop=[stop])])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.stop_reason == stop


def test_the_same_seed_gives_the_same_siblings(running: Troupe) -> None:
    one, two = running.generate([ask("A dog", n=3, seed=9, max_tokens=20)] * 2)
    assert [a.token_ids for a in one] == [a.token_ids for a in two]
    assert len({tuple(a.token_ids) for a in one}) == 3


def test_tokenize_and_detokenize(running: Troupe) -> None:
    with grpc.insecure_channel(running.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        ids = stub.Tokenize(inference_pb2.TokenizeRequest(text="Hello, wörld 🙂")).token_ids
        text = stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids)).text
        (model,) = stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert text == "Hello, wörld 🙂"
    assert model.name == "pageant-stories"
    assert model.max_model_len == 1024


def test_a_killed_worker_s_streams_go_on_with_the_same_tokens(running: Troupe) -> None:
    requests = [ask("One day", seed=index, max_tokens=300, ignore_eos=True) for index in range(6)]
    wanted = running.generate(requests)
    answers = asyncio.run(running.disturb(requests, "worker"))
    for (answer,), (alone,) in zip(answers, wanted, strict=True):
        assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)
    assert running.settled_load().num_preemptions > 0


def test_a_second_deployment_in_the_same_directory_is_refused(running: Troupe) -> None:
    run = running.log_dir.parent / "run"
    command = [
        sys.executable,
        "-m",
        "services.cli",
        "serve",
        "--port",
        "0",
        "--runtime-dir",
        str(run),
        "-m",
        str(MODEL),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 78
    assert "runtime_dir of its own" in done.stderr
    running.until_serving()


@pytest.mark.parametrize("service", ["detokenizer", "tokenizer", "scheduler"])
def test_a_killed_service_s_streams_go_on(running: Troupe, service: str) -> None:
    requests = [ask("One day", seed=index, max_tokens=300, ignore_eos=True) for index in range(4)]
    wanted = running.generate(requests)
    answers = asyncio.run(running.disturb(requests, service))
    for (answer,), (alone,) in zip(answers, wanted, strict=True):
        assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)
    running.until_serving()


@pytest.mark.parametrize("name", MODELS)
def test_known_greedy_continuations_come_out_exactly(data_dir: Path, tmp_path: Path, name: str) -> None:
    model = data_dir / "models" / name
    expected = json.loads((model / "expected_greedy.json").read_text(encoding="utf-8"))
    ids = next(value for key, value in expected.items() if key.startswith("greedy_ids"))
    prompt = expected["prompt_ids"]
    continuation = ids[len(prompt) :]
    with troupe(tmp_path, "-m", str(model), "--num-threads", "1") as started:
        ((by_ids,), (by_text,)) = started.generate([
            ask(token_ids=prompt, temperature=0.0, max_tokens=len(continuation)),
            ask(expected["prompt"], temperature=0.0, max_tokens=len(continuation)),
        ])  # fmt: skip
    assert by_ids.token_ids == continuation
    assert by_text.token_ids == continuation
    assert list(itertools.chain(prompt, by_text.token_ids)) == ids
