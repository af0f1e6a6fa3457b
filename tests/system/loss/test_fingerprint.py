"""Real processes, one by one: what would change an answer in the middle is refused by name, and stays away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import load_file, save_file

from protos.pageant.v1 import inference_pb2_grpc
from shared.processes.exit_status import EXIT_CONFIG
from tests.kernels.cpu.natives import load_build
from tests.system.harness import MODEL, ask, free_port

PATIENCE = 120.0  # seconds, on a machine that has much else to do
SETTINGS = {"dtype": "float32", "num_threads": 1, "num_blocks": 256, "resume_timeout": 300, "http_port": -1}


class House:
    """Services as processes of their own, without a supervisor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, service: str, **settings: Any) -> subprocess.Popen[bytes]:
        own = {"model": MODEL, "runtime_dir": self.directory / "run", "port": self.port, "log_format": "json"}
        named = {f"PAGEANT_{name.upper()}": str(value) for name, value in (SETTINGS | own | settings).items()}
        with (self.directory / f"{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"services.{service}"], env=os.environ | named, stderr=log
            )
        self.processes.append(process)
        return process

    def said(self, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        path = self.directory / f"{self.processes.index(process)}.log"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]

    def ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not any(line["event"] == "ready" for line in self.said(process)):
            assert process.poll() is None, self.said(process)
            assert time.monotonic() < deadline, self.said(process)
            time.sleep(0.05)

    def refused(self, process: subprocess.Popen[bytes]) -> str:
        """What a service ended with that starting again would not help."""
        assert process.wait(PATIENCE) == EXIT_CONFIG, self.said(process)
        (fatal,) = [line["error"] for line in self.said(process) if line["event"] == "fatal"]
        assert "refused by the scheduler" in fatal
        return str(fatal)

    def stream(self) -> Reading:
        return Reading(self.port)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class Reading(threading.Thread):
    """A greedy answer, read by a thread."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.fingerprints: set[str] = set()
        self.failure: Exception | None = None
        self.begun = threading.Event()
        self._port = port
        self.start()

    def run(self) -> None:
        request = ask("Once upon a time", max_tokens=230, temperature=0.0, ignore_eos=True)
        try:
            with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
                stub: Any = inference_pb2_grpc.InferenceStub(channel)
                for message in stub.Generate(request, timeout=4 * PATIENCE, wait_for_ready=True):
                    self.text += message.text
                    self.fingerprints.add(message.system_fingerprint)
                    self.begun.set()
        except Exception as error:
            self.failure = error
            self.begun.set()

    def whole(self) -> str:
        self.join(2 * PATIENCE)
        assert not self.is_alive() and self.failure is None, self.failure
        return self.text


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    load_build("native")
    directory = Path(tmp_path)
    made = House(directory)
    try:
        yield made
    finally:
        made.close()


def everybody(house: House) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """All services; returns scheduler and worker."""
    scheduler = house.start("scheduler")
    worker = house.start("worker")
    others = [house.start(name) for name in ("tokenizer", "detokenizer", "gateway")]
    for process in (worker, *others):
        house.ready(process)
    return scheduler, worker


def changed_model(directory: Path, what: str) -> Path:
    """The bundled model under the same name, but for one thing."""
    copy = directory / what / MODEL.name
    shutil.copytree(MODEL, copy)
    if what == "weights":
        tensors = load_file(copy / "model.safetensors")
        tensors["model.norm.weight"][0] *= 1.0625
        save_file(tensors, copy / "model.safetensors")
    elif what == "generation_config":
        (copy / "generation_config.json").write_text('{"temperature": 0.5}', encoding="utf-8")
    else:
        (copy / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    return copy


def test_a_mixture_is_refused_by_the_name_of_what_differs(house: House, tmp_path: Path) -> None:
    everybody(house)
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "dtype": ("worker", {"dtype": "bfloat16"}),
        "quantization": ("worker", {"quantization": "int8"}),
        "kv_cache_dtype": ("worker", {"kv_cache_dtype": "int8"}),
        "load_format": ("worker", {"load_format": "dummy"}),
        "executor": ("worker", {"kernels": "torch"}),
        "weights": ("worker", {"model": changed_model(tmp_path, "weights")}),
        "chat_template": ("tokenizer", {"model": changed_model(tmp_path, "chat_template")}),
        "generation_config": ("detokenizer", {"model": changed_model(tmp_path, "generation_config")}),
    }
    for part, (service, settings) in wrong.items():
        words = house.refused(house.start(service, **settings))
        assert f"its {part} is " in words, part
    house.ready(house.start("worker"))


def test_a_compiler_that_fails_does_not_change_what_is_computed(house: House, tmp_path: Path) -> None:
    """kernels=auto: the first worker may do with torch; beside one with native kernels that is another arithmetic."""
    everybody(house)
    cache = os.environ.get("XDG_CACHE_HOME")
    os.environ |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": "false"}
    try:
        worker = house.start("worker")
    finally:
        del os.environ["CXX"], os.environ["XDG_CACHE_HOME"]
        if cache is not None:
            os.environ["XDG_CACHE_HOME"] = cache
    words = house.refused(worker)
    assert "its executor is 'torch " in words and "this worker computes with torch: false failed" in words


def test_the_successor_of_the_only_worker_gives_the_same_text(house: House) -> None:
    """Whatever comes meanwhile, and although the scheduler is another by then."""
    scheduler, worker = everybody(house)
    wanted = house.stream().whole()
    reading = house.stream()
    assert reading.begun.wait(PATIENCE)
    worker.send_signal(signal.SIGKILL)
    assert "its dtype is 'bfloat16'" in house.refused(house.start("worker", dtype="bfloat16"))
    assert reading.is_alive(), "it was not there in time to be lost"
    scheduler.send_signal(signal.SIGKILL)
    scheduler.wait()
    house.start("scheduler")
    assert "its quantization is 'int8'" in house.refused(house.start("worker", quantization="int8"))
    assert reading.is_alive()
    house.ready(house.start("worker"))
    assert reading.whole() == wanted
    assert len(reading.fingerprints) == 1 and reading.fingerprints.pop().startswith("fp_")


def test_a_stream_of_mixed_workers_stays_with_its_kind(house: House) -> None:
    SETTINGS["mixed_workers"] = "true"
    try:
        _, worker = everybody(house)
        wanted = house.stream().whole()
        reading = house.stream()
        assert reading.begun.wait(PATIENCE)
        worker.send_signal(signal.SIGKILL)
        house.ready(house.start("worker", quantization="int8"))
        other = house.stream()
        assert other.whole() and other.fingerprints != reading.fingerprints
        assert reading.is_alive(), "a worker is there, and it computes something else"
        house.ready(house.start("worker"))
        assert reading.whole() == wanted and len(reading.fingerprints) == 1
    finally:
        del SETTINGS["mixed_workers"]
