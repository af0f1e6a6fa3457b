"""Adapters through real processes: named by requests, loaded and forgotten meanwhile, and through lost services."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from protos.pageant.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from scripts.bench.common.adapters import write_adapter
from tests.system.harness import MODEL, Answer, Troupe, ask, troupe

NAMES = ("pageant-stories", "module", "found")
LENGTH = 40


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("found", "other", "third")):
        write_adapter(MODEL, directory / name, seed=seed, scale=0.1)
    write_adapter(MODEL, directory.parent / "outside" / "module", seed=9, scale=0.1)
    shutil.copytree(directory / "other", directory / "broken")
    (directory / "broken" / "adapter_model.safetensors").write_bytes(b"nothing")
    return directory


@pytest.fixture(scope="module")
def running(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    module = adapters.parent / "outside" / "module"
    options = ["--lora-dir", str(adapters), "--lora-modules", f"module={module}", "--workers", "2"]
    options += ["--num-blocks", "256", "--num-threads", "1", "--max-loras", "2", "--max-cpu-loras", "3"]
    with troupe(tmp_path_factory.mktemp("troupe"), *options) as started:
        yield started


def asked(model: str, prompt: str = "Once upon a time", **more: Any) -> Any:
    request = ask(prompt, max_tokens=LENGTH, ignore_eos=True, seed=7, **more)
    request.model = model
    return request


def texts(answers: list[list[Answer]]) -> list[str]:
    return [answer.text for (answer,) in answers]


def post(running: Troupe, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json=body, timeout=60)


def complete(running: Troupe, model: str) -> str:
    answer = post(running, "/v1/completions", model=model, prompt="Once upon a time", max_tokens=LENGTH, seed=1)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def wanted(running: Troupe) -> dict[str, str]:
    """What each model says, asked alone."""
    found = {name: texts(running.generate([asked(name)]))[0] for name in NAMES}
    assert len(set(found.values())) == len(NAMES), "an adapter changes what is said"
    return found


def test_models_in_one_batch_say_what_each_says_alone(running: Troupe, wanted: dict[str, str]) -> None:
    names = [NAMES[index % 3] for index in range(18)]
    assert texts(running.generate([asked(name) for name in names])) == [wanted[name] for name in names]


def test_models_are_listed_with_their_parents(running: Troupe, wanted: dict[str, str]) -> None:
    listed = {one["id"]: one["parent"] for one in httpx.get(f"{running.url}/v1/models").json()["data"]}
    assert listed["pageant-stories"] is None
    assert listed["module"] == listed["found"] == "pageant-stories"
    assert httpx.get(f"{running.url}/v1/models/found").json()["root"].endswith("/found")
    with grpc.insecure_channel(running.address) as channel:
        models = inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest()).models
    assert {one.name: one.parent for one in models}["module"] == "pageant-stories"


def test_http_and_grpc_name_the_same(running: Troupe, wanted: dict[str, str]) -> None:
    assert complete(running, "found") == complete(running, "found")
    assert complete(running, "found") != complete(running, "module")


def test_what_cannot_be_served_says_why(running: Troupe, adapters: Path) -> None:
    for name in ("nothing", "../found", "found/.", "", " "):
        answer = post(running, "/v1/completions", model=name or "x", prompt="a", max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model"), name
    answer = post(running, "/v1/completions", model="broken", prompt="a", max_tokens=1)
    assert answer.status_code == 400
    assert "adapter_model.safetensors cannot be read" in answer.json()["error"]["message"]
    answer = post(running, "/v1/load_lora_adapter", lora_name="x", lora_path=str(adapters / "broken"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
    answer = post(running, "/v1/load_lora_adapter", lora_name="x", lora_path="/etc")
    assert "outside lora_dir" in answer.json()["error"]["message"]
    answer = post(running, "/v1/load_lora_adapter", lora_name="pageant-stories", lora_path=str(adapters / "other"))
    assert answer.json()["error"]["param"] == "lora_name"
    answer = post(running, "/v1/unload_lora_adapter", lora_name="nothing")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_name")


def test_other_content_under_the_same_name_is_served_at_once(
    running: Troupe, adapters: Path, wanted: dict[str, str]
) -> None:
    """Neither old weights nor old keys and values."""
    said = []
    for content in ("other", "third", "other"):
        named = {"lora_name": "changing", "lora_path": str(adapters / content)}
        loaded = post(running, "/v1/load_lora_adapter", **named, load_inplace=True)
        assert loaded.status_code == 200, loaded.text
        said += texts(running.generate([asked("changing")]))
    again = post(running, "/v1/load_lora_adapter", **named)
    assert again.status_code == 400 and "has already been loaded" in again.text
    assert said[0] == said[2] != said[1]
    assert said[1] == complete_alone(running, "third")
    assert post(running, "/v1/unload_lora_adapter", lora_name="changing").status_code == 200
    assert post(running, "/v1/completions", model="changing", prompt="a").status_code == 404


def complete_alone(running: Troupe, name: str) -> str:
    return texts(running.generate([asked(name)]))[0]


def test_operators_load_and_unload_by_grpc(running: Troupe, adapters: Path) -> None:
    with grpc.insecure_channel(running.address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        path = str(adapters / "other")
        loaded = control.LoadAdapter(control_pb2.LoadAdapterRequest(lora_name="by-grpc", lora_path=path), timeout=30)
        assert len(loaded.digest) == 32
        assert texts(running.generate([asked("by-grpc")])) == texts(running.generate([asked("other")]))
        control.UnloadAdapter(control_pb2.UnloadAdapterRequest(lora_name="by-grpc"), timeout=30)
        with pytest.raises(grpc.RpcError) as caught:
            control.UnloadAdapter(control_pb2.UnloadAdapterRequest(lora_name="by-grpc"), timeout=30)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("service", ["worker", "scheduler", "tokenizer", "detokenizer"])
def test_streams_go_on_through_a_lost_service(service: str, running: Troupe, wanted: dict[str, str]) -> None:
    names = [NAMES[index % 3] for index in range(12)]
    answers = asyncio.run(running.disturb([asked(name) for name in names], service, at_most=1))
    assert [answer.text for (answer,) in answers] == [wanted[name] for name in names]
    assert texts(running.generate([asked(name) for name in NAMES])) == [wanted[name] for name in NAMES]
