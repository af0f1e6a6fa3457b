"""The worker without a model: it samples where a plan asks for it, and nowhere else."""

from __future__ import annotations

from scripts.bench.common.standin import StandIn
from scripts.bench.common.tokens import Speech
from shared.config import Settings
from shared.messages import AdmittedSequence, StepPlan
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams


def plan(step_id: int, computed: int, scheduled: int, admitted: list[AdmittedSequence]) -> StepPlan:
    return StepPlan(1, step_id, admitted, [0], [computed], [scheduled], [0], [], [], [])


def test_a_chunk_of_what_a_preempted_sequence_had_said_samples_nothing() -> None:
    """Four tokens of a prompt and two of the answer are computed again, in chunks."""
    worker, seed = StandIn(Settings(), 0.0), 7
    admitted = AdmittedSequence(0, pack_tokens(range(6)), 4, SamplingParams(), seed, [])
    chunk = worker.run(plan(0, 0, 5, [admitted]))
    assert (chunk.num_sampled, chunk.sampled_token_ids) == ([0], [])
    rest = worker.run(plan(1, 5, 1, []))
    assert (rest.num_sampled, rest.sampled_token_ids) == ([1], [Speech().token(seed, 2)])
