"""Where a request's time can go: phases that exclude each other; and why a prefix cache did not have a prompt.

The numbers are places in lists that travel with messages: phases and reasons are only ever appended.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """docs/tracing.md says where each begins and ends.  Names in logs are these, in small letters."""

    GATEWAY = 0
    TO_TOKENIZER = 1
    TOKENISE = 2
    TO_SCHEDULER = 3
    QUEUE_STEP = 4  # nothing in the way but the steps in flight
    QUEUE_BUDGET = 5
    QUEUE_BLOCKS = 6
    QUEUE_ROWS = 7
    QUEUE_FAIRNESS = 8
    QUEUE_SIBLING = 9  # another sequence computes the prompt, or its beginning; or it comes from a store
    PREFILL = 10
    DECODE = 11
    DRAFT_WAIT = 12
    PREEMPTED = 13
    RECOMPUTE = 14
    LOST = 15  # a service that had it died
    TO_DETOKENIZER = 16
    DETOKENISE = 17
    TO_GATEWAY = 18
    CLIENT_BLOCKED = 19
    UNTOLD = 20  # in the deployment, which sent no more details before the call ended
    FROM_CLIENT = 21  # on its way to the gateway, by the client's own clock
    WAKING = 22  # its model slept, and is being loaded

    @property
    def label(self) -> str:
        return self.name.lower()


NUM_PHASES = len(Phase)
PHASE_LABELS = tuple(phase.label for phase in Phase)
IN_ORDER = (Phase.FROM_CLIENT, *(phase for phase in Phase if phase is not Phase.FROM_CLIENT))  # of a request's way
QUEUE = (
    Phase.QUEUE_STEP, Phase.QUEUE_BUDGET, Phase.QUEUE_BLOCKS, Phase.QUEUE_ROWS, Phase.QUEUE_FAIRNESS,
    Phase.QUEUE_SIBLING,
)  # fmt: skip
HOPS = (Phase.TO_TOKENIZER, Phase.TO_SCHEDULER, Phase.TO_DETOKENIZER, Phase.TO_GATEWAY)


class Miss(IntEnum):
    """Why prompt tokens were not in the prefix cache."""

    BELOW_BLOCK = 0  # behind the last block that a cache could hold: a prompt's last token is always computed
    NEVER_SEEN = 1
    EVICTED = 2
    OTHER_WORKER = 3
    WORKER_LOST = 4
    SALT = 5  # another tenant's cache has it: said in logs, never to clients
    NOT_ASKED = 6  # log-probabilities of the prompt need every position
    OFF = 7  # there is no prefix cache
    NO_STATE = 8  # its blocks are cached, but no snapshot of the state behind them

    @property
    def label(self) -> str:
        return self.name.lower()


NUM_MISSES = len(Miss)
MISS_LABELS = tuple(miss.label for miss in Miss)
