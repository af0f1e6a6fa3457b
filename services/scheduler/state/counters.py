"""What has happened so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Monotonic counts of one scheduler's life; token counts where the name says so."""

    num_preemptions: int = 0
    num_prefix_cache_queries: int = 0  # tokens
    num_prefix_cache_hits: int = 0  # tokens
    num_chunked_prefills: int = 0  # steps in which a prompt was computed in part
    num_block_copies: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0  # requests, as the four below
    num_aborted: int = 0
    num_rejected: int = 0
    num_expired: int = 0
    num_worker_losses: int = 0
    num_refused_rows: int = 0  # by workers, because they were stale
    num_leaked_rows: int = 0  # reclaimed, as the blocks below
    num_leaked_blocks: int = 0
    num_lost_steps: int = 0  # plans or answers that never came: their link was begun anew
    num_drafts: int = 0  # times that draft tokens were verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_stale_draft_tokens: int = 0
    num_late_drafts: int = 0  # waited for in vain
    num_late_masks: int = 0  # samples that were put off, as what a grammar allows was not known in time
    num_accepted_per_position: list[int] = field(default_factory=list)

    def verified(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.num_accepted_per_position)
        if missing > 0:
            self.num_accepted_per_position += [0] * missing
        for position in range(num_accepted):
            self.num_accepted_per_position[position] += 1
