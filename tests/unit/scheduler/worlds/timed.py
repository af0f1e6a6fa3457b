"""A world whose clock the test moves, and whose requests carry breakdowns."""

from __future__ import annotations

from typing import Any

from services.scheduler.state.policy import Policy
from shared.messages import AddRequest, LatencyBreakdown, RequestHeader, TokenBatch
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from shared.tracing.phases import NUM_PHASES, Miss, Phase
from tests.unit.scheduler.worlds.world import World, expected

STEP = 0.01  # seconds, as `World.answer` has it


class Timed(World):
    """Keeps every latency that goes out with tokens, and when each request came."""

    def __init__(self, policy: Policy | None = None, workers: int = 1, **limits: Any) -> None:
        self.breakdowns: dict[tuple[str, int], list[LatencyBreakdown]] = {}
        self.arrivals: dict[str, float] = {}
        self.cached: dict[str, int] = {}  # prompt tokens of each request's first sequence
        super().__init__(policy, 0, **limits)
        self.now = self.scheduler.clock.now = 1000.0
        take = self.scheduler.outbound.take_batches

        def taken() -> dict[str, TokenBatch]:
            batches = take()
            for batch in batches.values():
                self.cached.update({o.header.request_id: o.num_cached_tokens for o in batch.opened if not o.index})
                for tokens in batch.sequences:
                    if tokens.latency is not None:
                        self.breakdowns.setdefault((tokens.request_id, tokens.index), []).append(tokens.latency)
            return batches

        self.scheduler.outbound.take_batches = taken  # type: ignore[method-assign]
        for index in range(workers):
            self.join(f"w{index}")

    def ask(
        self,
        request_id: str,
        prompt: list[int],
        *,
        tenant: str = "",
        salt: str = "",
        sent_ago: float = 0.0,
        **params: Any,
    ) -> None:
        """Add a request that was sent so many seconds ago."""
        params = {"max_tokens": 8, "seed": 1, "ignore_eos": True, **params}
        resolved = SamplingParams(**params).resolved(GenerationDefaults(), max_tokens=16)
        header = RequestHeader(request_id, "g0", tenant=tenant, cache_salt=salt)
        latency = LatencyBreakdown([0] * NUM_PHASES, self.now - sent_ago)
        self.arrivals[request_id] = self.now - sent_ago
        self.scheduler.add(AddRequest(header, resolved, pack_tokens(prompt), [0], latency=latency), self.now)
        for index in range(resolved.n):
            self.wanted[request_id, index] = expected(prompt, resolved, index, self.limits.get("max_model_len", 128))
        self.after()

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def last(self, request_id: str, index: int = 0) -> LatencyBreakdown:
        """What was told with the end of a sequence."""
        assert (request_id, index) in self.finished, "it has not ended"
        return self.breakdowns[request_id, index][-1]

    def seconds(self, request_id: str, index: int = 0) -> dict[Phase, float]:
        """Where its time went, phases without time left out."""
        return {Phase(n): micros / 1e6 for n, micros in enumerate(self.last(request_id, index).spent) if micros}

    def misses(self, request_id: str, index: int = 0) -> dict[Miss, int]:
        counts = self.last(request_id, index).misses
        return {Miss(n): count for n, count in enumerate(counts) if count}

    def assert_sums(self) -> None:
        """Every latency that went out accounts for all the time from the arrival to its stamp."""
        assert self.breakdowns
        for (request_id, _), breakdowns in self.breakdowns.items():
            for latency in breakdowns:
                elapsed = latency.stamp - self.arrivals[request_id]
                assert abs(sum(latency.spent) / 1e6 - elapsed) < 1e-4, request_id
