"""The stand-in for vLLM's RemoteOpenAIServer: the same handle, with `pageant serve` behind it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from services.cli.addresses import free_port

READY_SECONDS = 600  # also where other work shares the processors
STOP_SECONDS = 20
CLIENT_SECONDS = 600  # as vLLM's own handle has it
POLL = 0.1
TREE = Path(__file__).parents[2]
ADAPTER = "PAGEANT_VLLM_ADAPTER"  # an adapter of that
CLASSIFIER = "PAGEANT_VLLM_CLASSIFIER"  # and one that classifies
CLASSIFIERS = ("jason9693/Qwen2.5-1.5B-apeach",)  # in whose place that is served
EMBEDDER = "PAGEANT_VLLM_EMBEDDER"  # one of so many components
EMBEDDERS = ("intfloat/multilingual-e5-small",)  # as this has
REASONER = "PAGEANT_VLLM_REASONER"  # one that thinks, where a test's server has a reasoning parser
LOGS = "PAGEANT_VLLM_LOGS"  # a folder in which the logs of all servers are kept, one file for each
OUTCOMES = "PAGEANT_VLLM_OUTCOMES"  # the file in which outcomes are kept, as JSON by test
SOURCE = "PAGEANT_VLLM_SOURCE"  # an unpacked source distribution of vLLM
MODEL = "PAGEANT_VLLM_MODEL"  # in the environment: the checkpoint that is served in place of the one that a test names

FLAGS = {  # of `vllm serve`, whose value a setting of Pageant's takes
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-logprobs": "max_logprobs",
    "--tool-call-parser": "tool_call_parser",
    "--reasoning-parser": "reasoning_parser",
    "--served-model-name": "served_model_name",
    "--chat-template": "chat_template",
    "--max-lora-rank": "max_lora_rank",
    "--max-cpu-loras": "max_cpu_loras",
    "--root-path": "root_path",
}
SWITCHES = {  # of `vllm serve` without a value
    "--enable-tokenizer-info-endpoint": ("enable_tokenizer_info_endpoint", "true"),
    "--enable-force-include-usage": ("enable_force_include_usage", "true"),
    "--enable-per-request-metrics": ("enable_per_request_metrics", "true"),
    "--enable-lora": ("max_loras", "2"),
    "--return-tokens-as-token-ids": ("return_tokens_as_token_ids", "true"),
}


class RemoteOpenAIServer:
    """One deployment from construction to `__exit__`.  Flags that Pageant has no setting for are left out."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False  # vLLM's word for those that it is about to drop

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_: Any) -> None:
        self.host = "127.0.0.1"
        self.port = _port_of(vllm_serve_args) or free_port()
        self._directory = tempfile.TemporaryDirectory(prefix="pageant-vllm-")
        path = Path(self._directory.name)
        self._log = path / "serve.log"
        settings = {"served_model_name": model} | settings_of(vllm_serve_args)
        settings |= {"http_port": str(self.port), "port": "0", "runtime_dir": f"{path}/run", "device": "cpu"}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEANT_")}
        environment |= {f"PAGEANT_{name.upper()}": value for name, value in settings.items()}
        environment["PYTHONPATH"] = str(TREE)
        words = [
            sys.executable,
            "-m",
            "services.cli",
            "serve",
            os.environ[_checkpoint(model, settings)],
        ]
        with self._log.open("wb") as log:
            self.proc = subprocess.Popen(words, env=environment, cwd=path, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_well():
            if self.proc.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"pageant serve does not come up:\n{self._log.read_text()[-2000:]}")
            time.sleep(POLL)

    def _is_well(self) -> bool:
        try:
            with urllib.request.urlopen(self.url_for("health"), timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        if kept := os.environ.get(LOGS):
            Path(kept).mkdir(parents=True, exist_ok=True)
            shutil.copy(self._log, Path(kept) / f"{self.proc.pid}.log")
        self._directory.cleanup()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> Any:
        return self._client("openai", "OpenAI", "v1", options)

    def get_async_client(self, **options: Any) -> Any:
        return self._client("openai", "AsyncOpenAI", "v1", options)

    def get_client_anthropic(self, **options: Any) -> Any:
        return self._client("anthropic", "Anthropic", "", options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        return self._client("anthropic", "AsyncAnthropic", "", options)

    def _client(self, package: str, kind: str, path: str, options: dict[str, Any]) -> Any:
        own = {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": CLIENT_SECONDS}
        return getattr(import_module(package), kind)(base_url=self.url_for(path), **own | options)


def settings_of(arguments: Sequence[str]) -> dict[str, str]:
    """Pageant's settings for arguments of `vllm serve`."""
    found = {}
    for word, values in _flags(arguments):
        if word in SWITCHES:
            name, value = SWITCHES[word]
            found[name] = value
        elif word == "--lora-modules":
            found["lora_modules"] = ",".join(_module(value) for value in values)
        elif word in FLAGS and values:
            found[FLAGS[word]] = ",".join(values)
    return found


def _checkpoint(model: str, settings: dict[str, str]) -> str:
    """The variable with the directory of what is served."""
    if model in CLASSIFIERS:
        return CLASSIFIER
    if model in EMBEDDERS:
        return EMBEDDER
    return REASONER if settings.get("reasoning_parser") else MODEL


def _module(value: str) -> str:
    """A name and a directory, as words or as JSON; whatever the directory, it is the adapter that there is."""
    name = json.loads(value)["name"] if value.startswith("{") else value.partition("=")[0]
    return f"{name}={os.environ[ADAPTER]}"


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    places = [place for place, word in enumerate(words) if word.startswith("--")]
    for place, end in zip(places, [*places[1:], len(words)], strict=True):
        yield words[place], words[place + 1 : end]


def _port_of(arguments: Sequence[str]) -> int:
    return next((int(values[0]) for word, values in _flags(arguments) if word == "--port"), 0)
