"""About the server: models, health, version, metrics and tokens."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.messages import Fingerprint, GetLoad, Load, PiecesRequest, PiecesResult, ServiceName, WorkerLoad
from shared.packing import unpack_tokens
from shared.version import VERSION
from tests.unit.gateway.http.client import http
from tests.unit.gateway.troupe import until


async def test_models() -> None:
    async with http() as h:
        (model,) = (await h.client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
        assert (await h.client.get("/v1/models/tiny")).json() == model
        assert (await h.client.get("/v1/models/other")).status_code == 404


async def test_models_say_what_is_computed_with() -> None:
    async with http() as h:
        assert (await h.client.get("/v1/models/tiny")).json()["system_fingerprint"] is None
        h.troupe.fingerprints = [Fingerprint(dtype="float32")]
        h.troupe.announce()
        await until(lambda: bool(h.troupe.gateway.roster.fingerprints))
        model = (await h.client.get("/v1/models/tiny")).json()
        assert model["system_fingerprint"] == Fingerprint(dtype="float32").name


async def test_version_is_the_project_s() -> None:
    async with http() as h:
        assert (await h.client.get("/version")).json() == {"version": VERSION} == {"version": version("pageant")}


async def test_health_says_what_is_missing() -> None:
    async with http() as h:
        assert (await h.client.get("/health")).status_code == 200
        h.troupe.announce(ServiceName.WORKER)
        await until(lambda: bool(h.troupe.gateway.readiness.missing))
        response = await h.client.get("/health")
        assert response.status_code == 503 and "worker" in response.json()["reason"]


async def test_metrics_are_what_the_scheduler_counts() -> None:
    async with http() as h:
        asked = asyncio.create_task(h.client.get("/metrics"))
        question = await h.troupe.get(h.troupe.scheduler, GetLoad)
        worker = WorkerLoad("w1", 1, 100, 50, 20, 9, "fp_1")
        numbers: dict[str, Any] = dict.fromkeys(
            ("num_preemptions", "num_prefix_cache_queries", "num_prefix_cache_hits", "num_chunked_prefills",
             "num_prompt_tokens", "num_finished", "num_aborted", "num_rejected"), 0,
        )  # fmt: skip
        h.troupe.tell(Load(question.request_id, 3, 4, [worker], num_output_tokens=77, **numbers))
        response = await asked
        found = {
            (sample.name, sample.labels.get("worker")): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }
        assert found["vllm:num_requests_running", None] == 3
        assert found["vllm:generation_tokens_total", None] == 77
        assert found["pageant_worker_kv_blocks_free", "w1"] == 50
        assert found["pageant_scheduler_up", None] == 1
        assert 'pageant_worker_fingerprint_info{engine="0",fingerprint="fp_1",' in response.text


async def test_tokens() -> None:
    async with http() as h:
        asked = h.post("/tokenize", {"prompt": "Hi", "return_token_strs": True, "add_special_tokens": False})
        assert not (await h.answer_encode([7, 8, 7])).add_special_tokens
        _, pieces = await h.troupe.asked(PiecesRequest)
        assert pieces.as_written and unpack_tokens(pieces.token_ids) == [7, 8]
        h.troupe.tell(PiecesResult(pieces.request_id, ["Ġt".encode(), b"u"]))
        answer = (await asked).json()
        assert answer == {"count": 3, "max_model_len": 512, "tokens": [7, 8, 7], "token_strs": ["Ġt", "u", "Ġt"]}
        asked = h.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False})
        question = await h.answer_encode([7])
        assert question.chat_options is not None and not question.chat_options.add_generation_prompt
        assert (await asked).json()["count"] == 1
        asked = h.post("/detokenize", {"tokens": [7]})
        assert not (await h.answer_decode("Hi")).skip_special_tokens
        assert (await asked).json() == {"prompt": "Hi"}


async def test_what_a_path_cannot_do() -> None:
    async with http() as h:
        response = await h.client.get("/v1/completions")
        assert response.status_code == 405 and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("root_path", ["/llm", "llm/"])
async def test_every_path_is_served_behind_a_proxys_too(root_path: str) -> None:
    key = {"authorization": "Bearer a-long-key"}
    async with http(root_path=root_path, api_keys="a-long-key") as h:
        for path in ("/llm/v1/models", "/v1/models"):
            assert (await h.client.get(path, headers=key)).status_code == 200
            assert (await h.client.get(path)).status_code == 401
        assert (await h.client.get("/llm/health")).status_code == 200
        for path in ("/llmv1/models", "/other/v1/models"):
            assert (await h.client.get(path, headers=key)).status_code == 404
