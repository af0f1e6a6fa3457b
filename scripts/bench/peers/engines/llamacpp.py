"""llama.cpp's llama-server over HTTP on the loopback: one slot for each request of a workload."""

from __future__ import annotations

import ctypes
import http.client
import json
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PR_SET_PDEATHSIG = 1
READY_SECONDS = 60


class LlamaServer:
    """The server divides its memory among its slots, so each workload has a server of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._server: subprocess.Popen[bytes] | None = None
        self._shape = (0, 0)
        self._port = 0
        self._clients = ThreadPoolExecutor(options["max_num_seqs"])
        said = subprocess.run([options["server"], "--version"], capture_output=True, check=True, text=True)
        self.version = "llama.cpp " + (said.stderr + said.stdout).partition("\n")[0].removeprefix("version: ")

    def prepare(self, num_seqs: int, num_tokens: int) -> None:
        shape = (num_seqs, num_seqs * (num_tokens + 64))
        if shape != self._shape:
            self.close()
            self._shape = shape
            self._start(*shape)

    def _start(self, num_seqs: int, num_tokens: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        threads = str(self._options["num_threads"])
        slots = ["-np", str(num_seqs), "-c", str(num_tokens), *(["--no-kv-unified"] if num_seqs > 1 else [])]
        compute = ["-t", threads, "-tb", threads, "-b", "2048", "-ub", "512", "-fa", "on"]
        front = ["--host", "127.0.0.1", "--port", str(self._port), "--no-webui", "--cache-ram", "0"]
        front += ["--threads-http", str(self._options["max_num_seqs"] + 2)]
        command = [self._options["server"], "-m", self._options["model"], *slots, *compute, *front]
        self._server = subprocess.Popen(command, preexec_fn=_die_with_parent)
        self._wait_until_ready(self._server)

    def _wait_until_ready(self, server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and server.poll() is None:
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError("llama-server does not come up; see its log")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=900)
        content = json.dumps(body) if body is not None else None
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def _complete(self, request: tuple[list[int], int]) -> int:
        prompt, count = request
        sampling = {"temperature": 0, "top_k": 1, "samplers": ["top_k"], "ignore_eos": True, "n_probs": 0}
        body = {"prompt": prompt, "n_predict": count, "cache_prompt": True, "stream": False, **sampling}
        return int(self._ask("POST", "/completion", body)[1]["tokens_predicted"])

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        return {"num_tokens": list(self._clients.map(self._complete, requests))}

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._server = None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


load = LlamaServer
