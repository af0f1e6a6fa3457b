"""The pytest plugin: puts stand-ins in the place of vLLM, and writes what became of each test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scripts.vllm_http.imports import install
from scripts.vllm_http.reasons import never_ends
from scripts.vllm_http.server import ADAPTER, MODEL, OUTCOMES, SOURCE, RemoteOpenAIServer
from shared.version import VERSION


def get_tokenizer(name: str = "", *_: Any, **__: Any) -> Any:
    """The tokenizer of the checkpoint that is served, whatever a test calls it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ[MODEL])


class ModelConfig:
    """vLLM's, of which tests ask for the size of the vocabulary."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        config: dict[str, int] = json.loads((Path(os.environ[MODEL]) / "config.json").read_text())
        return config["vocab_size"]


class Hub:
    """Hugging Face's: what is fetched from it is the adapter that there is."""

    def snapshot_download(self, *_: Any, **__: Any) -> str:
        return os.environ[ADAPTER]


class ErrorResponse:
    """vLLM's errors: the fields that tests read."""

    @staticmethod
    def model_validate(body: Any) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(error=SimpleNamespace(**body["error"]))


def _pydantic() -> dict[str, Any]:
    from pydantic import BaseModel

    class EmbeddingData(BaseModel):
        index: int
        object: str
        embedding: list[float] | str

    class UsageInfo(BaseModel):
        prompt_tokens: int
        total_tokens: int
        completion_tokens: int | None = 0

    class EmbeddingResponse(BaseModel):
        id: str
        object: str
        created: int
        model: str
        data: list[EmbeddingData]
        usage: UsageInfo

    class ClassificationData(BaseModel):
        index: int
        label: str | None
        probs: list[float]
        num_classes: int

    class ClassificationResponse(EmbeddingResponse):
        data: list[ClassificationData]  # type: ignore[assignment]

    class PoolingData(BaseModel):
        index: int
        object: str
        data: list[float] | str

    class PoolingResponse(EmbeddingResponse):
        data: list[PoolingData]  # type: ignore[assignment]

    return {one.__name__: one for one in (EmbeddingResponse, ClassificationResponse, PoolingResponse)}


install(
    Path(os.environ[SOURCE]),
    {
        "tests.utils": {"RemoteOpenAIServer": RemoteOpenAIServer, "ROCM_EXTRA_ARGS": [], "ROCM_ENV_OVERRIDES": {},
                        "multi_gpu_only": lambda **_: (lambda test: test)},
        "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
        "vllm.transformers_utils.repo_utils": {"hf_api": Hub},
        "vllm.config": {"ModelConfig": ModelConfig},
        "vllm.version": {"__version__": VERSION},
        "vllm.entrypoints.serve.engine.protocol": {"ErrorResponse": ErrorResponse},
        "vllm.entrypoints.pooling.embed.protocol": _pydantic(),
        "vllm.entrypoints.pooling.classify.protocol": _pydantic(),
        "vllm.entrypoints.pooling.pooling.protocol": _pydantic(),
        "vllm.platforms": {"current_platform": type("Platform", (), {
            "is_rocm": staticmethod(lambda: False), "is_xpu": staticmethod(lambda: False),
            "is_cpu": staticmethod(lambda: True), "is_cuda": staticmethod(lambda: False),
        })},
    },
)  # fmt: skip

outcomes: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    """Of the images that tests show to models that see: those are not run."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    import transformers

    def of_the_served(cls: Any, name: str, *_: Any, **__: Any) -> Any:
        return load(os.environ[MODEL])

    load = transformers.AutoTokenizer.from_pretrained
    transformers.AutoTokenizer.from_pretrained = classmethod(of_the_served)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if never_ends(item.nodeid):
        pytest.fail("not run: it does not end where it fails")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Notes what became of a test: its setup counts where that fails or skips."""
    report = (yield).get_result()
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        reason = str(call.excinfo.value).strip().splitlines() if call.excinfo else []
        kind = call.excinfo.typename if call.excinfo else ""
        outcomes[item.nodeid] = {"outcome": report.outcome, "reason": f"{kind}: {(reason or [''])[0][:300]}"}
        keep()


def keep() -> None:
    """After each test: a run that is cut has its outcomes."""
    path = Path(os.environ[OUTCOMES])
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | outcomes, indent=1))
