"""The terminal's side of the gRPC interface: a channel, a stream of text, and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from shared.client.answers import FINISH_REASONS

# A server that is just starting is tried again after milliseconds, where gRPC's own custom is a second.  How long one
# attempt may take stays as it is: a far or busy server needs more than that.
CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # of its own, not shared with other clients in this process
]
PROBE_TIMEOUT = 0.5


class Figures:
    """What one generation took, as its client saw it."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first = self._last = 0.0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.finish_reason = ""
        self.explanation: Any = None  # where the server says that the time went

    def add(self, response: Any) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last
        if response.HasField("usage"):
            self.prompt_tokens = response.usage.prompt_tokens
            self.cached_tokens = response.usage.cached_tokens
            self.completion_tokens += response.usage.completion_tokens
            self.num_draft_tokens += response.usage.num_draft_tokens
            self.num_accepted_tokens += response.usage.num_accepted_tokens
        if response.finish_reason:
            self.finish_reason = FINISH_REASONS.get(response.finish_reason, "")
        if response.HasField("explanation"):
            self.explanation = response.explanation

    @property
    def ttft_ms(self) -> float:
        """From asking to the first output."""
        return 1000 * (self._first - self._start) if self._first else 0.0

    @property
    def tpot_ms(self) -> float:
        """Per token after the first."""
        return 1000 * (self._last - self._first) / max(1, self.completion_tokens - 1)

    def __str__(self) -> str:
        verified = f"draft tokens accepted: {self.num_accepted_tokens} of {self.num_draft_tokens}  "
        return (
            f"finish reason: {self.finish_reason or 'none'}  "
            f"prompt tokens: {self.prompt_tokens}  completion tokens: {self.completion_tokens}  "
            f"cached tokens: {self.cached_tokens}  {verified if self.num_draft_tokens else ''}"
            f"time to first token: {self.ttft_ms:.1f} ms  "
            f"time per output token: {self.tpot_ms:.2f} ms"
        )


class TerminalClient:
    """One connection to a gateway, over TLS where an `authority` is trusted (PEM)."""

    def __init__(self, address: str, *, key: str = "", authority: bytes | None = None) -> None:
        self.address = address
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        if authority is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            trusted = grpc.ssl_channel_credentials(authority)
            self._channel = grpc.secure_channel(address, trusted, options=CHANNEL_OPTIONS)
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    @property
    def serving(self) -> bool:
        """Whether the server says that it can serve requests now."""
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def generate(self, sampling: dict[str, Any], write: Callable[[str], None], **request: Any) -> tuple[str, Figures]:
        """Stream one completion into `write`; returns all of it.  Raises grpc.RpcError."""
        figures, parts = Figures(), []
        call = self._inference.Generate(
            inference_pb2.GenerateRequest(sampling=sampling, **request), metadata=self._metadata
        )
        try:
            for response in call:
                figures.add(response)
                if response.text:
                    parts.append(response.text)
                    write(response.text)
        finally:
            call.cancel()  # also at the server, where this is left early
        return "".join(parts), figures


def printable(text: str) -> str:
    """Without the control characters that a terminal would obey."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t" or not char.isascii())


def explain(error: grpc.RpcError, address: str) -> str:
    """A failed call in words that help."""
    code, details = getattr(error, "code", lambda: None)(), getattr(error, "details", lambda: "")() or str(error)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{details}; with --api-key, or PAGEANT_API_KEY in the environment"
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details:
        return f"nothing answers at {address}; start it with `pageant serve`"
    return f"{code.name.lower()}: {details}" if code is not None else details
