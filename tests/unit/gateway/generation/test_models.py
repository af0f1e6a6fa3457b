"""Two models at one gateway: which a request goes to, by name, alias and adapter; and one that is removed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.pageant.v1 import control_pb2
from protos.pageant.v1.inference_pb2 import GenerateRequest, ListModelsRequest
from services.gateway.member import ModelMember
from shared.config import FurtherModel, write_models
from shared.messages import (
    Adapter,
    AdapterLoaded,
    GetLoad,
    Load,
    LoadAdapter,
    Member,
    Roster,
    SchedulerInbox,
    ServiceName,
    TokenizeRequest,
    TokenizerInbox,
    UnloadAdapter,
)
from shared.transport import MemoryTransport
from tests.unit.gateway.troupe import CAPACITY, Front, failure, front, until


class Other:
    """The second model's deployment, as far as a gateway sees it."""

    def __init__(self) -> None:
        self.network = MemoryTransport()
        self.scheduler = self.network.bind("scheduler", SchedulerInbox)
        self.tokenizer = self.network.bind("tokenizer-b", TokenizerInbox)

    def announce(
        self, member: ModelMember, *, version: int = 1, without: ServiceName | None = None, **more: Any
    ) -> None:
        services = (ServiceName.TOKENIZER, ServiceName.WORKER, ServiceName.DETOKENIZER)
        gone = ServiceName.WORKER if more.get("is_asleep") else without
        members = [Member(one, f"{one}-b", f"memory://{one}-b", 1) for one in services if one is not gone]
        own = Member(ServiceName.GATEWAY, member.instance, member.inbox.address, member.epoch)
        adapters = [Adapter("poet", "d1g", "/adapters/poet")]
        member.inbox.post(Roster(1, version, [*members, own], CAPACITY, 256, 250, adapters=adapters, **more))


async def joined(f: Front, other: Other, file: Path, *models: FurtherModel) -> ModelMember:
    """The gateway's member of the second model, once it can serve."""
    links = f.troupe.gateway.links
    links._make = lambda _: other.network
    write_models(file, list(models))
    await until(lambda: bool(links.members))
    (member,) = links.members.values()
    other.announce(member)
    await until(lambda: not member.readiness.missing)
    return member


async def test_a_request_goes_to_the_model_that_it_names(tmp_path: Path) -> None:
    file, other = tmp_path / "models.json", Other()
    async with front(models_file=str(file)) as f:
        second = FurtherModel(name="second", model="m", aliases=["two"])
        member = await joined(f, other, file, second)
        listed = await f.inference.ListModels(ListModelsRequest())
        assert [(one.name, one.max_model_len, one.parent) for one in listed.models] == [
            ("tiny", 512, ""), ("second", 256, ""), ("poet", 256, "second")
        ]  # fmt: skip
        for name in ("second", "two", "poet"):
            call = f.inference.Generate(GenerateRequest(text=name, model=name))
            request = await f.troupe.get(other.tokenizer, TokenizeRequest)
            assert request.text == name and request.header.gateway == member.inbox.address
            assert (request.header.adapter is not None) == (name == "poet")
            call.cancel()
        for name in ("", "tiny"):
            call = f.inference.Generate(GenerateRequest(text="x", model=name))
            assert (await f.troupe.request()).header.gateway == f.troupe.gateway.inbox.address
            call.cancel()
        error = await failure(f.inference.Generate(GenerateRequest(text="x", model="third")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert error.details() == "model 'third' is not served; served: tiny, second, two, poet"


async def test_a_model_that_sleeps_takes_requests_and_one_that_is_removed_takes_none(tmp_path: Path) -> None:
    file, other = tmp_path / "models.json", Other()
    async with front(models_file=str(file)) as f:
        member = await joined(f, other, file, FurtherModel(name="second", model="m"))
        other.announce(member, version=2, is_asleep=True)
        await until(lambda: member.roster.is_asleep)
        assert not member.readiness.missing, "its worker comes when it is wanted"
        call = f.inference.Generate(GenerateRequest(text="x", model="second"))
        await f.troupe.get(other.tokenizer, TokenizeRequest)
        write_models(file, [])
        await until(lambda: not f.troupe.gateway.links.members)
        error = await failure(f.inference.Generate(GenerateRequest(text="x", model="second")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert len(member.generation.journal) == 1, "what is open goes on"
        call.cancel()
        await until(lambda: not f.troupe.gateway.links.leaving)


async def test_load_and_adapters_are_those_of_the_model_that_is_named(tmp_path: Path) -> None:
    file, other = tmp_path / "models.json", Other()
    async with front(models_file=str(file)) as f:
        member = await joined(f, other, file, FurtherModel(name="second", model="m"))
        asked = f.control.GetLoad(control_pb2.GetLoadRequest(model="second"))
        question = await f.troupe.get(other.scheduler, GetLoad)
        zeros: dict[str, Any] = dict.fromkeys(Load.__struct_fields__[4:13], 0)  # those without a default
        member.inbox.post(Load(question.request_id, 5, 0, [], **zeros))
        assert (await asked).num_running == 5

        loading = f.control.LoadAdapter(
            control_pb2.LoadAdapterRequest(lora_name="bard", lora_path="/adapters/bard", model="second")
        )
        told = await f.troupe.get(other.scheduler, LoadAdapter)
        assert (told.name, told.path) == ("bard", "/adapters/bard")
        member.inbox.post(AdapterLoaded(told.request_id, Adapter("bard", "d2g", told.path)))
        assert (await loading).digest == "d2g"
        assert "bard" in member.generation.adapters.listed()
        assert "bard" not in f.troupe.gateway.generation.adapters.listed()

        ending = f.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(lora_name="bard", model="second"))
        gone = await f.troupe.get(other.scheduler, UnloadAdapter)
        member.inbox.post(AdapterLoaded(gone.request_id, Adapter("bard", "d2g")))
        await ending
        for call in (f.control.GetLoad, f.control.LoadAdapter, f.control.UnloadAdapter):
            kind = getattr(control_pb2, f"{call._method.rpartition(b'/')[2].decode()}Request")
            assert (await failure(call(kind(model="third")))).code() is grpc.StatusCode.NOT_FOUND


async def test_health_tells_of_each_model_by_its_names(tmp_path: Path) -> None:
    file, other = tmp_path / "models.json", Other()
    words = health_pb2.HealthCheckResponse
    async with front(models_file=str(file), http_port=0) as f:
        member = await joined(f, other, file, FurtherModel(name="second", model="m", aliases=["two"]))
        stub: Any = health_pb2_grpc.HealthStub(f.channel)
        server = f.troupe.gateway.http
        assert server is not None
        url = f"http://127.0.0.1:{server.port}/health?model="

        async def statuses(*names: str) -> list[int]:
            f.troupe.gateway.readiness.notice()  # as every tick does
            found = []
            for name in names:
                try:
                    found.append((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.NOT_FOUND
                    found.append(words.SERVICE_UNKNOWN)
            return found

        async def until_statuses(wanted: dict[str, int]) -> None:
            async with asyncio.timeout(30):
                while await statuses(*wanted) != list(wanted.values()):
                    await asyncio.sleep(0.01)

        async with httpx2.AsyncClient(trust_env=False) as client:
            await until_statuses(dict.fromkeys(["", "tiny", "second", "two"], words.SERVING) | {"third": 3})
            assert [(await client.get(url + name)).status_code for name in ("", "tiny", "two")] == [200] * 3
            unknown = await client.get(f"{url}third")
            assert unknown.status_code == 404 and "tiny" not in unknown.text, "names are for those with a key"

            other.announce(member, version=2, without=ServiceName.WORKER)
            await until_statuses({"": words.SERVING, "tiny": words.SERVING, "second": words.NOT_SERVING})
            assert (await client.get(f"{url}second")).status_code == 503
            assert (await client.get(url)).status_code == 200

            write_models(file, [])
            await until_statuses({"tiny": words.SERVING, "second": words.SERVICE_UNKNOWN})
