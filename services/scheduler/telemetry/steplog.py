"""What the steps were made of: a histogram always, and a log line for each where `log_steps` is on."""

from __future__ import annotations

from typing import Any

from services.scheduler.state.replica import Replica
from services.scheduler.state.step import Step
from shared.messages import StepPlan, StepResult
from shared.metrics.histogram import STEP_TOKENS, Histogram


class StepMeter:
    """Tokens per step, of all workers: of prompts, and generated ones."""

    def __init__(self) -> None:
        self.tokens = Histogram(STEP_TOKENS)

    def planned(self, replica: Replica, plan: StepPlan, now: float) -> None:
        """A plan is sent; `now` in Unix seconds."""

    def answered(self, replica: Replica, step: Step, result: StepResult, now: float) -> dict[str, Any] | None:
        """Its result has come; returns the fields of a log line where there is to be one."""
        self.tokens.observe(num_new_prompt_tokens(step) + sum(result.num_sampled))
        return None


class StepLog(StepMeter):
    """Makes a line of every step."""

    def __init__(self) -> None:
        super().__init__()
        self._planned: dict[tuple[int, int], dict[str, Any]] = {}  # by epoch and step

    def planned(self, replica: Replica, plan: StepPlan, now: float) -> None:
        if plan.step_id == 0:
            self._forget(replica.instance)
        step = replica.in_flight[-1]
        self._planned[plan.epoch, plan.step_id] = {
            "at": now,
            "worker": replica.instance,
            "step_id": plan.step_id,
            "num_tokens": sum(step.num_scheduled),
            "num_prefill_tokens": num_prompt_tokens(step),
            "num_draft_tokens": step.num_drafts,
            "num_admitted": step.num_admitted,
            "num_running": len(replica.running),
            "num_waiting": len(replica.waiting),
            "num_used_blocks": sum(pool.num_held for pool in replica.pools),
            "num_blocks": sum(pool.size for pool in replica.pools),
            "sequences": [
                [sequence.request.request_id, sequence.index, count]
                for sequence, count in zip(step.sequences, step.num_scheduled, strict=True)
            ],
        }

    def answered(self, replica: Replica, step: Step, result: StepResult, now: float) -> dict[str, Any] | None:
        super().answered(replica, step, result, now)
        fields = self._planned.pop((result.epoch, result.step_id), None)
        if fields is None:
            return None
        times = {"ms": round(1000 * (now - fields["at"]), 3), "device_ms": round(1000 * result.device_time, 3)}
        return fields | times

    def _forget(self, worker: str) -> None:
        """A worker begins anew: what was in flight there is never answered."""
        self._planned = {key: fields for key, fields in self._planned.items() if fields["worker"] != worker}


def num_new_prompt_tokens(step: Step) -> int:
    """Of a step's tokens, those of prompts."""
    rows = zip(step.sequences, step.num_computed, step.num_scheduled, strict=True)
    return sum(max(0, min(count, sequence.request.num_prompt_tokens - computed)) for sequence, computed, count in rows)


def num_prompt_tokens(step: Step) -> int:
    """Of a step's tokens, those that belong to prompts, or to what is computed again."""
    own = (count - len(drafts.token_ids) for count, drafts in zip(step.num_scheduled, step.drafts, strict=True))
    return sum(count for count in own if count > 1)
