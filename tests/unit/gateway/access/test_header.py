"""From a call's metadata to a request's header: traces, deadlines, seeds, and when it was sent."""

from __future__ import annotations

import pytest

from services.gateway.access.header import cache_salt, make_header, read_metadata, seeded
from shared.clocks.clock import steady_time
from shared.requests.sampling import SamplingParams


def test_a_trace_is_carried_on_or_begun() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    assert read_metadata([("traceparent", f"00-{trace}-00f067aa0ba902b7-01")]).trace_id == trace
    for bad in ("", "00-xyz", f"00-{'0' * 32}-00f067aa0ba902b7-01"):
        fresh = read_metadata([("traceparent", bad), ("x-tenant", "t"), ("blob-bin", b"\0")])
        assert len(fresh.trace_id) == 32 and fresh.trace_id not in (trace, "0" * 32) and fresh.tenant == "t"


def test_the_header_is_the_servers_own() -> None:
    call = read_metadata([("x-tenant", "t")])
    before = steady_time()
    first, second = (
        make_header(call, gateway="g", label="l", priority=2, now=100.0, remaining=left) for left in (5.0, None)
    )
    assert first.request_id != second.request_id and first.label == "l"
    assert first.deadline is not None and before <= first.deadline - 5.0 <= steady_time() and second.deadline is None
    assert cache_salt("") == "" and cache_salt("a") != cache_salt("b") and cache_salt("a") == cache_salt("a")


def test_a_seed_is_drawn_only_where_none_was_given() -> None:
    assert seeded(SamplingParams(seed=5)).seed == 5
    assert seeded(SamplingParams()).seed != seeded(SamplingParams()).seed


NOW = 1_795_261_499.25


@pytest.mark.parametrize("text", ["t=1795261498.75", "1795261498.75", "t=1795261498750", "1795261498750000"])
def test_a_request_start_is_read_as_proxies_write_it(text: str) -> None:
    call = read_metadata([("x-request-start", text)])
    header = make_header(call, gateway="g", label="", priority=0, now=NOW, remaining=2.0)
    assert header.sent_time == pytest.approx(NOW - 0.5, abs=1e-4)
    assert header.arrival_time == NOW and header.deadline is not None and header.deadline <= steady_time() + 2.0


@pytest.mark.parametrize(
    "text", ["", "soon", "t=", "-1795261498", "1e9", "nan", "t=1795261500", "1795261000", "9" * 99]
)
def test_a_request_start_that_cannot_be_is_none(text: str) -> None:
    call = read_metadata([("x-request-start", text)])
    assert make_header(call, gateway="g", label="", priority=0, now=NOW, remaining=None).sent_time == 0.0
