"""What a draft model's guesses take by themselves: the draft service's session and proposer, without messages.

    python -m scripts.bench.speculation.guessing --model DIR --threads 1 --drafts 1,2,4,8

Prints JSON: the number of draft tokens -> seconds from an update with one token that was not guessed to its answer,
medians, for a lone sequence.
"""

from __future__ import annotations

import random
import time

from scripts.bench.speculation.cost import PROMPT, Costs, measure_in_turns, run
from services.draft.load import load_proposer
from services.draft.proposer import Proposer
from services.draft.session import DraftSession
from shared.config import Settings
from shared.messages import AdmittedSequence, DraftUpdate
from shared.packing import pack_tokens
from shared.sampling import SamplingParams

ROW = 0


class LoneGuesses:
    """One greedy sequence, of which the draft is told tokens drawn at random."""

    def __init__(self, proposer: Proposer) -> None:
        self._session = DraftSession(proposer)
        self._vocab_size = proposer.capacity.vocab_size
        self._rng = random.Random(1)
        self._num_updates = 0
        self._num_told = 0

    def begin(self) -> None:
        """Another sequence, its prompt read."""
        prompt = pack_tokens([self._draw() for _ in range(PROMPT)])
        params = SamplingParams(temperature=0.0, max_tokens=PROMPT * 8, ignore_eos=True)
        self._num_told = PROMPT
        self._ask(1, [AdmittedSequence(ROW, prompt, PROMPT, params, 0, [])])

    def step(self, num_drafts: int) -> float:
        """Seconds until so many tokens are guessed."""
        return self._ask(num_drafts, [])

    def _ask(self, num_drafts: int, opened: list[AdmittedSequence]) -> float:
        self._num_updates += 1
        update = DraftUpdate(
            epoch=1,
            update_id=self._num_updates,
            closed_rows=[],
            opened=opened,
            rows=[ROW],
            num_tokens=[self._num_told],
            num_new=[1],
            new_token_ids=[self._draw()],
            num_wanted=[num_drafts],
        )
        begin = time.perf_counter()
        self._session.apply(update)
        while not self._session.is_idle:
            self._session.turn()
        self._num_told += 1
        return time.perf_counter() - begin

    def _draw(self) -> int:
        return self._rng.randrange(self._vocab_size)


def measure(model: str, num_threads: int, drafts: list[int]) -> Costs:
    settings = Settings.of(model=model, draft=model, draft_num_threads=num_threads)
    return measure_in_turns(LoneGuesses(load_proposer(settings)), drafts)


if __name__ == "__main__":
    run(measure, __doc__)
