"""Beam searches in the scheduler's fake world: a worker that says which tokens are likely, and what must come out."""

from __future__ import annotations

import math
import random
from typing import Any

from services.scheduler.state.beam_search import BeamOutput, BeamSearch, Hypothesis, LengthBounds
from services.scheduler.state.policy import Policy
from shared.messages import StepPlan, StepResult, TokenLogprobs, WorkerCapacity
from shared.packing import unpack_tokens
from shared.requests.beam import Beam
from shared.requests.sampling import SamplingParams
from tests.unit.scheduler.worlds.fake_worker import VOCAB, FakeWorker
from tests.unit.scheduler.worlds.world import World


def logprobs_of(history: list[int], vocab_size: int) -> list[float]:
    """Of every token behind a history: a pure function of it, and no two alike."""
    source = random.Random(repr(history))
    logits = [source.gauss(0.0, 2.0) for _ in range(vocab_size)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def said_of(history: list[int], vocab_size: int, count: int) -> TokenLogprobs:
    """As a worker says it, with the likeliest token taken."""
    logprobs = logprobs_of(history, vocab_size)
    ids = sorted(range(vocab_size), key=lambda token: -logprobs[token])
    shown = [ids[0], *ids[:count]]
    return TokenLogprobs(shown, [logprobs[token] for token in shown], 1)


class BeamWorker(FakeWorker):
    """Takes the likeliest token where log-probabilities are asked for, and says them."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        super().__init__(capacity)
        self.counts: dict[int, int | None] = {}
        self.num_told: int = 0  # sequences that were told

    def run(self, plan: StepPlan) -> StepResult:
        for admitted in plan.admitted:
            assert len(unpack_tokens(admitted.token_ids)) >= admitted.num_prompt_tokens
            self.counts[admitted.row] = admitted.params.logprobs
            self.num_told += 1
        result = super().run(plan)
        tokens: list[int] = []
        said: list[TokenLogprobs | None] = []
        sampled = iter(result.sampled_token_ids)
        for row, num_sampled in zip(plan.rows, result.num_sampled, strict=True):
            for _ in range(num_sampled):
                token, entry = next(sampled), None
                if (count := self.counts[row]) is not None:
                    history = self.rows[row].tokens
                    entry = said_of(history[:-1], self.capacity.vocab_size, count)
                    token = history[-1] = entry.token_ids[0]
                tokens.append(token)
                said.append(entry)
        return StepResult(plan.epoch, plan.step_id, result.num_sampled, tokens, said if any(said) else [])


class BeamWorld(World):
    """`add_beam` beside what a world has; every search's outcome is known beforehand."""

    def __init__(self, policy: Policy | None = None, workers: int = 1, vocab_size: int = VOCAB, **limits: Any) -> None:
        self.vocab_size = vocab_size
        super().__init__(policy, workers, **limits)

    def join(self, name: str, size: WorkerCapacity | None = None) -> None:
        super().join(name, size)
        self.workers[name] = BeamWorker(self.workers[name].capacity)

    def add_beam(
        self, request_id: str, prompt: list[int], beam: Beam, n: int = 1, is_background: bool = False, **params: Any
    ) -> None:
        params = {"ignore_eos": True, "max_tokens": 8, **params}
        self.add(request_id, prompt, beam=beam, n=n, is_background=is_background, **params)
        longest = self.limits.get("max_model_len", 128)
        found = search(prompt, SamplingParams(beam=beam, **params), self.vocab_size, longest)
        for index in range(n):
            self.wanted[request_id, index] = found[index].token_ids


def search(prompt: list[int], params: SamplingParams, vocab_size: int, max_model_len: int) -> list[Hypothesis]:
    """The outcome of a search by itself, best first."""
    assert params.beam is not None
    ends = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else [0])))
    found = BeamSearch(params.beam, ends, params.logprobs)
    outputs: dict[int, BeamOutput] = {0: BeamOutput([], [])}
    longest = min(params.max_tokens or 1, max_model_len - len(prompt))
    while True:
        for slot, output in outputs.items():
            found.hear(slot, said_of([*prompt, *output.token_ids], vocab_size, found.num_candidates))
        moves = found.advance(outputs, LengthBounds(params.min_tokens, longest))
        if not moves:
            return found.hypotheses
        outputs = {
            move.slot: BeamOutput(
                [*outputs[move.source].token_ids, move.token_id], [*outputs[move.source].logprobs, move.logprobs]
            )
            for move in moves
        }
