"""Phases as they are shown: where each is spent, and what they have in common."""

from __future__ import annotations

from shared.phases import HOPS, IN_ORDER, QUEUE, Phase

ORDER = tuple(phase.label for phase in IN_ORDER)
GATEWAY, TOKENIZER, SCHEDULER, WORKER, DETOKENIZER = "gateway", "tokenizer", "scheduler", "worker", "detokenizer"
SERVICES = (GATEWAY, TOKENIZER, SCHEDULER, WORKER, "draft", DETOKENIZER)  # in the order of a request's way

PLACES = {  # where a phase is spent; a hop, on the way to the one named
    Phase.GATEWAY: GATEWAY,
    Phase.TO_TOKENIZER: TOKENIZER,
    Phase.TOKENISE: TOKENIZER,
    Phase.TO_SCHEDULER: SCHEDULER,
    **dict.fromkeys(QUEUE, SCHEDULER),
    Phase.PREFILL: WORKER,
    Phase.DECODE: WORKER,
    Phase.DRAFT_WAIT: WORKER,
    Phase.PREEMPTED: SCHEDULER,
    Phase.RECOMPUTE: WORKER,
    Phase.LOST: SCHEDULER,
    Phase.TO_DETOKENIZER: DETOKENIZER,
    Phase.DETOKENISE: DETOKENIZER,
    Phase.TO_GATEWAY: GATEWAY,
    Phase.CLIENT_BLOCKED: GATEWAY,
    Phase.UNTOLD: GATEWAY,
    Phase.FROM_CLIENT: GATEWAY,
}
GROUPS = {  # what a picture has one colour for
    **{phase.label: phase.label for phase in Phase},
    **dict.fromkeys((hop.label for hop in (Phase.FROM_CLIENT, *HOPS)), "hops"),
    **dict.fromkeys((phase.label for phase in QUEUE), "queue"),
    Phase.PREEMPTED.label: "interrupted",
    Phase.RECOMPUTE.label: "interrupted",
    Phase.LOST.label: "interrupted",
    Phase.UNTOLD.label: "interrupted",
}
GROUP_ORDER = tuple(dict.fromkeys(GROUPS[label] for label in ORDER))


def place_of(label: str) -> str:
    """The service in which a phase is spent."""
    return PLACES[Phase[label.upper()]] if label in ORDER else SCHEDULER


def is_hop(label: str) -> bool:
    return GROUPS.get(label) == "hops"


def rank(label: str) -> int:
    """The place of a phase in a request's way; phases of later versions come last."""
    return ORDER.index(label) if label in ORDER else len(ORDER)
