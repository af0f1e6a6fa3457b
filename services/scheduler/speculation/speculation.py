"""What a worker's steps are made of where there are drafts: the mode, whether to wait, what each sequence is given."""

from __future__ import annotations

from services.scheduler.draft_length.acceptance import KEPT_OF_ALL, AcceptanceRate
from services.scheduler.draft_length.controller import DraftLengthController
from services.scheduler.draft_length.modes import PLAIN, SpeculationMode, modes_of, yields
from services.scheduler.speculation.drafts import DraftLink
from services.scheduler.speculation.records import DraftRecord, DraftRecords
from services.scheduler.state.sequence import Sequence
from services.scheduler.state.step import Step

PRIOR = 0.6  # acceptance that is believed before anything was measured
LEAST_CHANCE = 0.05  # of being accepted, with which a draft token is still worth its place in a step
PROBE = 32  # tokens after which a sequence that gets no drafts is given one, to see whether it would accept them now
LEAST_PATIENCE = 0.002  # seconds
MOST_PATIENCE = 1.0
UNKNOWN_STEP = 0.05  # seconds: what a plain step is believed to take where none was measured


class Speculation:
    """One worker's.  `begin` comes before each step's plan, `record` with each step's result.

    Invariant: drafts are asked for only where no step is in flight, and once for each step.
    """

    def __init__(self, records: DraftRecords, *, fixed: int, longest: int, may_run_ahead: bool = True) -> None:
        self._records = records
        self.mode = PLAIN  # of the step that is planned next
        self.has_asked = False  # for the drafts of that step
        self.acceptance = AcceptanceRate(kept=KEPT_OF_ALL)  # of all sequences
        self.draft_seconds = 0.0  # of computing, per step of a draft
        self._modes = modes_of(fixed, longest, may_run_ahead=may_run_ahead)
        self._longest = longest
        self._controllers: dict[int, DraftLengthController] = {}
        self._awaited: dict[DraftLink, int] = {}  # the update that each is to answer
        self._deadline = 0.0
        self._last: tuple[float, int, SpeculationMode] | None = None  # when the last step came back, its size and mode

    # -- the choice

    def choose(self, running: list[Sequence]) -> SpeculationMode:
        """The next step's mode.  Only asked where none is in flight or the last one was plain."""
        controller = self._controller(len(running))
        if controller.is_due:
            controller.choose(self._yields(running), self.draft_seconds)
        self.mode = controller.mode
        return self.mode

    def _controller(self, num_sequences: int) -> DraftLengthController:
        size = size_of(num_sequences)
        if size not in self._controllers:
            self._controllers[size] = DraftLengthController(self._modes)
        return self._controllers[size]

    def _yields(self, running: list[Sequence]) -> list[float]:
        prior = self.acceptance.share(PRIOR)
        return yields((self._records.of(sequence).acceptance.share(prior) for sequence in running), self._longest)

    def num_wanted(self, sequence: Sequence) -> int:
        """Draft tokens for one sequence: up to the mode's, while what one more is likely to bring is worth its part of
        the step."""
        share = self._records.of(sequence).acceptance.share(self.acceptance.share(PRIOR))
        count, chance, is_fixed = 0, share, len(self._modes) == 1
        while count < self.mode.num_draft_tokens and (is_fixed or chance >= LEAST_CHANCE):
            count += 1
            chance *= share
        if count == 0 and sequence.num_output_tokens % PROBE == 0:
            return 1
        return count

    # -- waiting for drafts

    def ask(self, awaited: dict[DraftLink, int], running: list[Sequence], now: float) -> None:
        """Drafts were asked for; the step waits for missing ones as long as they are worth it."""
        self.has_asked = True
        self._awaited = {link: update for link, update in awaited.items() if not link.is_late}
        if self._awaited:
            self._deadline = now + self._patience(running)

    def _patience(self, running: list[Sequence]) -> float:
        """The time that plain steps would take for the tokens that drafts are likely to add."""
        controller = self._controller(len(running))
        seconds = controller.seconds(PLAIN if PLAIN in controller.costs else self.mode) or UNKNOWN_STEP
        more = self._yields(running)[self.mode.num_draft_tokens] - 1.0
        return min(max(more * seconds, LEAST_PATIENCE), MOST_PATIENCE)

    def waits(self, now: float) -> bool:
        """Whether drafts that were asked for are still worth waiting for."""
        self._awaited = {
            link: update for link, update in self._awaited.items() if not link.is_gone and link.num_answered < update
        }
        return bool(self._awaited) and now < self._deadline

    def give_up(self) -> int:
        """Go on without the missing drafts; returns how many there are."""
        num_late = len(self._awaited)
        for link in self._awaited:
            link.is_late = True
        self._awaited = {}
        return num_late

    @property
    def wake_time(self) -> float | None:
        """The time at which waiting ends; None where no draft is waited for."""
        return self._deadline if self._awaited else None

    def planned(self) -> None:
        """The step that was asked for is sent."""
        self.has_asked = False
        self._awaited = {}

    # -- what was measured

    def record(self, step: Step, now: float) -> None:
        """A step has come back.  Only steps in which every sequence decodes are measured, each from the result of the
        step before, which must have had a mode like its own."""
        size = size_of(len(step.sequences))
        controller = self._controller(len(step.sequences))
        is_plain_round = not step.num_admitted and sum(step.num_scheduled) == len(step.sequences) + step.num_drafts
        if is_plain_round and step.mode == controller.mode and self._last is not None:
            before, last_size, last_arm = self._last
            if last_size == size and step.mode.is_like(last_arm):
                controller.record(now - before, step.num_drafts / len(step.sequences))
        self._last = (now, size, step.mode)

    def judge(self, record: DraftRecord, num_draft_tokens: int, num_accepted: int) -> None:
        """Note how many of a sequence's draft tokens were accepted."""
        self.acceptance.record(num_draft_tokens, num_accepted)
        record.acceptance.record(num_draft_tokens, num_accepted)

    def drafted(self, seconds: float) -> None:
        """Note the seconds that a draft reports for one of its steps."""
        weight = 0.1 if self.draft_seconds else 1.0
        self.draft_seconds += weight * (seconds - self.draft_seconds)


def size_of(num_sequences: int) -> int:
    """The power of two that is nearest, so that a batch which lacks a few for a moment is of the same size."""
    return (4 * num_sequences // 3).bit_length()
