"""What the gateway makes of a call's metadata: ids, tenant, trace and seed."""

from __future__ import annotations

import hashlib
import random
import re
import uuid
from collections.abc import Iterable

import msgspec

from shared.clocks.clock import steady_time
from shared.errors import RequestError
from shared.messages import Adapter, RequestHeader
from shared.requests.sampling import SamplingParams

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")
START = re.compile(r"(?:t=)?([0-9]{9,17}(?:\.[0-9]{1,9})?)")
BEYOND_SECONDS = 1e9  # the present is more than so many seconds, and less than a thousand times that
MAX_WAY = 60.0  # seconds: a request that seems to have taken longer comes from another clock
SPAN_DIGITS = 16
MAX_KEY_CHARS = 256


class CallMetadata(msgspec.Struct, frozen=True):
    """The metadata that means something here."""

    tenant: str = ""
    trace_id: str = ""
    parent_span_id: str = ""  # the caller's; empty where it sent no trace
    sent_time: float = 0.0  # Unix seconds by the caller's clock; 0 where it did not say
    is_background: bool = False  # a line of a batch; no header says so


def read_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> CallMetadata:
    """The tenant, and the caller's trace or a fresh one."""
    found = {key: value for key, value in metadata if isinstance(value, str)}
    match = TRACEPARENT.fullmatch(found.get("traceparent", ""))
    trace_id, span_id = match.groups() if match else (uuid.uuid4().hex, "")
    return CallMetadata(found.get("x-tenant", ""), trace_id, span_id, _read_start(found.get("x-request-start", "")))


def _read_start(text: str) -> float:
    """Unix seconds of an `X-Request-Start`, as proxies and load balancers write it: `t=` or nothing, then seconds,
    milliseconds or microseconds.  0 where it is something else."""
    match = START.fullmatch(text)
    if match is None:
        return 0.0
    value = float(match[1])
    return next((value / per_second for per_second in (1e6, 1e3) if value > BEYOND_SECONDS * per_second), value)


def traceparent(header: RequestHeader) -> str:
    """What is passed on to the caller, by W3C Trace Context: its trace, and our span in it."""
    return f"00-{header.trace_id}-{header.request_id[:SPAN_DIGITS]}-01"


def cache_salt(tenant: str) -> str:
    """What keeps the prompt caches of tenants apart; the same on every gateway."""
    return hashlib.sha256(f"tenant\0{tenant}".encode()).hexdigest()[:16] if tenant else ""


def salted(salt: str, own: str) -> str:
    """The salt of a client that keeps a part of its tenant's cache for itself."""
    return hashlib.sha256(f"salt\0{salt}\0{own}".encode("utf-8", "surrogatepass")).hexdigest()[:16]


def make_header(
    call: CallMetadata,
    *,
    gateway: str,
    label: str,
    priority: int,
    now: float,
    remaining: float | None,
    key: str = "",
    adapter: Adapter | None = None,
    is_gathered: bool = False,
) -> RequestHeader:
    """The header of a new request; `now` in Unix seconds, `remaining` seconds until the caller gives up.

    With an idempotency `key` the request has the same id whenever and wherever its tenant asks for it.
    """
    return RequestHeader(
        request_id=_digest(call.tenant, key).hex() if key else uuid.uuid4().hex,
        gateway=gateway,
        trace_id=call.trace_id,
        label=label,
        tenant=call.tenant,
        priority=priority,
        arrival_time=now,
        deadline=None if remaining is None else steady_time() + remaining,
        cache_salt=cache_salt(call.tenant),
        is_kept=bool(key),
        parent_span_id=call.parent_span_id,
        sent_time=call.sent_time if 0.0 <= now - call.sent_time <= MAX_WAY else 0.0,
        is_background=call.is_background,
        adapter=adapter,
        is_gathered=is_gathered,
    )


def check_key(key: str) -> None:
    """Raise RequestError where an idempotency key is too long."""
    if len(key) > MAX_KEY_CHARS:
        raise RequestError(
            f"idempotency_key has {len(key)} characters, more than {MAX_KEY_CHARS}", field="idempotency_key"
        )


def seeded(params: SamplingParams, tenant: str = "", key: str = "") -> SamplingParams:
    """With a seed drawn where the client gave none: from here on every token is a function of the request.

    With an idempotency key it is made from that, so that the same call gives the same tokens at any gateway.
    """
    if params.seed is not None:
        return params
    drawn = int.from_bytes(_digest(tenant, key)[:8], "little") >> 2 if key else random.getrandbits(62)
    return msgspec.structs.replace(params, seed=drawn)


def _digest(tenant: str, key: str) -> bytes:
    return hashlib.blake2b(f"{tenant}\0{key}".encode(), digest_size=16, person=b"idempotency").digest()
