"""Health, reflection, models, tokenizing, load, abort and drain over a real gRPC server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.pageant.v1 import control_pb2, inference_pb2
from shared.errors import RejectCode
from shared.messages import (
    AbortRequest,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    EncodeResult,
    GetLoad,
    Goodbye,
    Load,
    RequestRejected,
    ServiceName,
    WorkerLoad,
)
from shared.packing import pack_tokens, unpack_tokens
from tests.unit.gateway.troupe import LAST, Front, failure, front, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(f: Front, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(f.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def until_health(f: Front, status: int) -> None:
    async with asyncio.timeout(30):
        while await health(f, "pageant.v1.Inference") != status:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("service", [ServiceName.TOKENIZER, ServiceName.WORKER, ServiceName.DETOKENIZER])
async def test_health_follows_the_roster(service: ServiceName) -> None:
    async with front() as f:
        await until_health(f, SERVING)
        assert await health(f) == SERVING
        f.troupe.announce(service)
        await until_health(f, NOT_SERVING)
        assert await health(f, "pageant.v1.Control") == SERVING
        f.troupe.announce()
        await until_health(f, SERVING)


async def test_health_falls_with_the_scheduler() -> None:
    async with front(heartbeat_timeout=0.1) as f:
        await until_health(f, NOT_SERVING)


async def test_reflection_lists_the_services() -> None:
    async with front() as f:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(f.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"pageant.v1.Inference", "pageant.v1.Control", "grpc.health.v1.Health"} <= names


async def test_models() -> None:
    async with front() as f:
        (model,) = (await f.inference.ListModels(inference_pb2.ListModelsRequest())).models
        assert (model.name, model.max_model_len, model.max_input_length) == ("tiny", 512, 500)
        assert (model.vocab_size, model.dtype, model.device) == (1000, "float32", "cpu")


async def test_thousands_of_calls_at_once_are_all_answered() -> None:
    """By themselves gRPC's servers cancel some of more than a thousand that were not taken up yet."""
    async with front() as f:
        calls = [f.inference.ListModels(inference_pb2.ListModelsRequest()) for _ in range(4000)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [answer for answer in answers if isinstance(answer, BaseException)] == []


async def test_tokenize_and_detokenize() -> None:
    async with front() as f:
        call = f.inference.Tokenize(inference_pb2.TokenizeRequest(text="a b", add_special_tokens=False))
        _, question = await f.troupe.asked(EncodeRequest)
        assert question.text == "a b" and not question.add_special_tokens
        f.troupe.tell(EncodeResult(question.request_id, pack_tokens([4, 5])))
        assert list((await call).token_ids) == [4, 5]

        call = f.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[4, 5]))
        _, asked = await f.troupe.asked(DecodeRequest)
        assert unpack_tokens(asked.token_ids) == [4, 5] and asked.skip_special_tokens
        f.troupe.tell(DecodeResult(asked.request_id, "a b"))
        assert (await call).text == "a b"


async def test_a_question_is_refused_or_moves_to_another_tokenizer() -> None:
    async with front() as f:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        call = f.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
        name, question = await f.troupe.asked(EncodeRequest)
        assert question.chat is not None and question.chat[0].role == "user"
        f.troupe.announce(name)
        other, again = await f.troupe.asked(EncodeRequest)
        assert other != name
        f.troupe.tell(RequestRejected(again.request_id, RejectCode.INVALID_ARGUMENT, "no template", "chat"))
        error = await failure(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "chat: no template")


@pytest.mark.parametrize("character", ["x", "é", "模", "😀", "\n", "%"])
async def test_a_status_s_text_is_no_longer_than_clients_take(character: str) -> None:
    async with front() as f:
        error = await failure(f.inference.Detokenize(inference_pb2.DetokenizeRequest(model=character * 9999)))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert dict(error.trailing_metadata())["error-field"] == "model"


async def test_load() -> None:
    async with front() as f:
        call = f.control.GetLoad(control_pb2.GetLoadRequest())
        question = await f.troupe.get(f.troupe.scheduler, GetLoad)
        workers = [WorkerLoad("worker-a", 1, 64, 60, 2, 9)]
        f.troupe.tell(
            Load(question.request_id, 1, 2, workers, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0.5, 13, 14, 15, 16, 17, [9, 6])
        )
        load = await call
        assert (load.num_running, load.num_waiting, load.num_preemptions, load.kv_cache_usage) == (1, 2, 3, 0.5)
        assert (load.num_finished, load.num_aborted, load.num_rejected, load.num_block_copies) == (9, 10, 11, 12)
        assert (load.num_drafts, load.num_draft_tokens, load.num_accepted_tokens) == (13, 14, 15)
        assert (load.num_stale_draft_tokens, load.num_late_drafts) == (16, 17)
        assert list(load.num_accepted_tokens_per_position) == [9, 6]
        assert load.workers[0].num_free_blocks == 60 and load.workers[0].instance == "worker-a"


async def test_load_of_a_mute_scheduler_is_unavailable() -> None:
    async with front() as f:
        error = await failure(f.control.GetLoad(control_pb2.GetLoadRequest()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_abort_by_label_reaches_only_the_callers_tenant() -> None:
    async with front() as f:
        calls = {
            tenant: f.inference.Generate(
                inference_pb2.GenerateRequest(text="x", label="mine"), metadata=(("x-tenant", tenant),)
            )
            for tenant in ("a", "b")
        }
        requests = {request.header.tenant: request for request in [await f.troupe.request(), await f.troupe.request()]}
        answer = await f.control.Abort(control_pb2.AbortRequest(label="mine"), metadata=(("x-tenant", "a"),))
        assert answer.num_aborted == 1
        assert (await failure(calls["a"])).code() is grpc.StatusCode.CANCELLED
        assert (await f.troupe.asked(AbortRequest))[1].request_id == requests["a"].header.request_id
        by_id = control_pb2.AbortRequest(request_id=requests["b"].header.request_id)
        assert (await f.control.Abort(by_id)).num_aborted == 1
        assert (await failure(calls["b"])).code() is grpc.StatusCode.CANCELLED
        assert (await f.control.Abort(by_id)).num_aborted == 0
        error = await failure(f.control.Abort(control_pb2.AbortRequest()))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_draining_refuses_the_new_and_finishes_the_open() -> None:
    async with front() as f:
        call = f.inference.Generate(inference_pb2.GenerateRequest(text="x"))
        request = await f.troupe.request()
        answer = await f.control.Drain(control_pb2.DrainRequest(timeout=5))
        assert answer.num_open_streams == 1
        await until_health(f, NOT_SERVING)
        error = await failure(f.inference.Generate(inference_pb2.GenerateRequest(text="y")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and error.details() == "the server is draining"
        f.troupe.say(request, "bye", **LAST)
        assert [response.text async for response in call] == ["bye"]
        await f.troupe.get(f.troupe.scheduler, Goodbye)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1.0])
async def test_a_time_to_drain_that_is_none_is_refused(timeout: float) -> None:
    async with front() as f:
        error = await failure(f.control.Drain(control_pb2.DrainRequest(timeout=timeout)))
        assert dict(error.trailing_metadata())["error-field"] == "timeout"
        assert not f.troupe.gateway.readiness.unwell


async def test_the_drain_deadline_ends_what_is_left() -> None:
    async with front() as f:
        call = f.inference.Generate(inference_pb2.GenerateRequest(text="x"))
        request = await f.troupe.request()
        await f.control.Drain(control_pb2.DrainRequest(timeout=0.1))
        assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
        assert (await f.troupe.asked(AbortRequest))[1].request_id == request.header.request_id
        await until(lambda: f.troupe.gateway.inbox.address not in f.troupe.network.inboxes)
