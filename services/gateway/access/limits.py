"""How much a gateway takes on at a time, in all and of each tenant.  No I/O; the clock is given."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.streams.journal import prompt_bytes
from shared.config import AdmissionSettings, SchedulingSettings
from shared.errors import RejectCode, RequestError
from shared.messages import DecodeRequest, EncodeRequest, TokenizeRequest

CHARS_PER_TOKEN = 4  # of a text that is not tokenized yet
DEFAULT_OUTPUT = 16  # tokens, of a text that does not say
UNKNOWN_LENGTH = 1 << 20  # tokens, while no worker has said how long a sequence may be
SMOOTHING = 0.1  # weight of the newest interval between two ends
MIN_RETRY_MS, UNKNOWN_RETRY_MS, MAX_RETRY_MS = 100, 1_000, 10_000


@dataclass(frozen=True, slots=True)
class TenantBounds:
    """The most at a time; 0: no bound."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Open:
    """The requests and tokens that are open now."""

    requests: int = 0
    tokens: int = 0

    def excess(self, tokens: int, bounds: TenantBounds, kind: str) -> str:
        """What a request of so many tokens would make too much, or nothing.  The first is always let in.  `kind`: in
        the names of the settings, `open` or `tenant`."""
        if bounds.requests and self.requests >= bounds.requests:
            return f"{self.requests} requests are open, the limit is max_{kind}_reqs={bounds.requests}"
        if bounds.tokens and self.requests and self.tokens + tokens > bounds.tokens:
            limit = f"max_{kind}_tokens={bounds.tokens}"
            return f"{self.tokens} tokens are open and {tokens} more are asked for, the limit is {limit}"
        return ""

    def add(self, tokens: int, sign: int = 1) -> None:
        self.requests += sign
        self.tokens += sign * tokens


class Admission:
    """Requests from when they are let in until they end, whatever they ended with.

    Those of the background are counted apart, in all: they take no place of others, nor of their tenant.

    Invariant: what is open, in all and of each tenant, is the sum over the requests that are let in.
    """

    def __init__(
        self,
        everyone: TenantBounds,
        tenant: TenantBounds,
        *,
        max_n: int = 64,
        clock: Callable[[], float] = time.monotonic,
        background: TenantBounds | None = None,
    ) -> None:
        """`background`: None: as for everyone."""
        self._bounds = everyone
        self._tenant_bounds = tenant
        self._max_n = max_n
        self._clock = clock
        self._open = Open()
        self._tenants: defaultdict[str, Open] = defaultdict(Open)
        self._sizes: dict[str, int] = {}  # tokens, by request id
        self._background_bounds = background or everyone
        self._background = Open()
        self._background_sizes: dict[str, int] = {}
        self._interval = 0.0  # seconds between two ends, smoothed
        self._last_end = 0.0

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_tokens(self) -> int:
        return self._open.tokens

    def admit(self, request: TokenizeRequest, max_model_len: int) -> None:
        """Let a request in, or raise RequestError where too much is open; `max_model_len` 0: not known yet."""
        size = tokens_of(request, max_model_len, self._max_n)
        if request.header.is_background:
            self._enter_background(request.header.request_id, size)
            return
        self.enter(request.header.request_id, request.header.tenant, size)

    def enter(self, request_id: str, tenant: str, size: int) -> None:
        """Let in what may come to hold so many tokens."""
        if excess := self._open.excess(size, self._bounds, "open"):
            raise self._refusal(f"at this gateway {excess}")
        if tenant in self._tenants and (excess := self._tenants[tenant].excess(size, self._tenant_bounds, "tenant")):
            raise self._refusal(f"of this tenant {excess}")
        self._sizes[request_id] = size
        self._open.add(size)
        self._tenants[tenant].add(size)

    def _enter_background(self, request_id: str, size: int) -> None:
        if self._background.excess(size, self._background_bounds, "background"):
            open_now = self._background
            raise self._refusal(
                f"{open_now.requests} background requests of {open_now.tokens} tokens are open at this gateway, and no "
                "more are taken"
            )
        self._background_sizes[request_id] = size
        self._background.add(size)

    def release(self, request: TokenizeRequest) -> None:
        """A request has ended; nothing where it was not let in."""
        if request.header.is_background:
            size = self._background_sizes.pop(request.header.request_id, None)
            if size is not None:
                self._background.add(size, -1)
            return
        self.leave(request.header.request_id, request.header.tenant)

    def leave(self, request_id: str, tenant: str) -> None:
        size = self._sizes.pop(request_id, None)
        if size is None:
            return
        self._open.add(size, -1)
        self._tenants[tenant].add(size, -1)
        if not self._tenants[tenant].requests:
            del self._tenants[tenant]
        now = self._clock()
        if self._last_end:
            self._interval += SMOOTHING * (now - self._last_end - self._interval)
        self._last_end = now

    def _refusal(self, message: str) -> RequestError:
        """Clients that come back together find as many places as have become free meanwhile."""
        wait = int(1000 * self._interval * max(1, len(self) // 8)) or UNKNOWN_RETRY_MS
        wait = min(max(wait, MIN_RETRY_MS), MAX_RETRY_MS)
        return RequestError(message, code=RejectCode.RESOURCE_EXHAUSTED, retry_after_ms=wait)


def make_admission(admission: AdmissionSettings, scheduling: SchedulingSettings) -> Admission:
    requests = admission.max_open_reqs or 2 * (scheduling.max_num_queued_reqs + scheduling.max_num_seqs)
    everyone = TenantBounds(requests, admission.max_open_tokens or 2 * scheduling.max_num_queued_tokens)
    each = TenantBounds(admission.max_tenant_reqs, admission.max_tenant_tokens)
    background = TenantBounds(scheduling.max_num_queued_background_reqs + scheduling.max_num_seqs, everyone.tokens)
    return Admission(everyone, each, max_n=scheduling.max_n, background=background)


def tokens_of(request: TokenizeRequest, max_model_len: int, max_n: int) -> int:
    """What a request may come to hold: its prompt, estimated where it is text, and every token that it asks for.

    What is out of range counts as the most there can be: it is refused later, for what is wrong with it.
    """
    longest = max_model_len or UNKNOWN_LENGTH
    prompt = min(prompt_tokens(request), longest)
    wanted = request.params.max_tokens
    if wanted is None:
        wanted = DEFAULT_OUTPUT if request.chat is None else longest
    beam = request.params.beam
    num_sequences = min(max(1, request.params.n if beam is None else beam.width), max_n)
    return prompt + num_sequences * min(max(0, wanted), longest - prompt)


def prompt_tokens(request: TokenizeRequest | EncodeRequest | DecodeRequest) -> int:
    """Tokens of a prompt or a question, estimated where it is text."""
    if not isinstance(request, EncodeRequest) and request.token_ids is not None:
        return len(request.token_ids) // 4
    assert not isinstance(request, DecodeRequest)  # it has token ids
    return prompt_bytes(request) // CHARS_PER_TOKEN + 1
