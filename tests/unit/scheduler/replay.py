"""Plays a recorded mailbox to a fresh core and says what plans come out:  python -m tests.unit.scheduler.replay FILE

One JSON line per event: its kind, a worker's or a draft's name where it concerns one, the message's own bytes, in hex,
and the time.
Torch is out of reach while it runs: a recording from anywhere can be replayed on a machine that has none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from services.scheduler.policy import Policy
from services.scheduler.scheduler import Scheduler
from shared.messages import Decoder, DraftProposals, Hello, Message, SchedulerInbox, StepResult, encode


def record(kind: str, member: str = "", message: Message | None = None, now: float = 0.0) -> str:
    """One line of a recording."""
    return json.dumps([kind, member, encode(message).hex() if message is not None else "", now])


def replay(lines: Iterable[str], policy: Policy) -> tuple[int, str]:
    """The number of plans, and a digest over all their bytes."""
    core, decoder = Scheduler(policy), Decoder[Any](SchedulerInbox)
    core.set_detokenizers(["d0"])
    digest, num_plans = sha256(), 0
    for line in lines:
        kind, member, data, now = json.loads(line)
        message = decoder.decode(bytes.fromhex(data)) if data else None
        if kind == "plan":
            plan = core.schedule(member, now)
            core.drafts.take_updates()
            if plan is not None:
                digest.update(encode(plan))
                num_plans += 1
        else:
            handle(core, kind, member, message, now)
    return num_plans, digest.hexdigest()


def handle(core: Scheduler, kind: str, member: str, message: Any, now: float) -> None:
    if isinstance(message, Hello) and message.worker is not None:
        core.add_worker(member, message.epoch, message.worker)
    elif isinstance(message, Hello) and message.draft is not None:
        core.add_draft(member, message.epoch, message.draft)
    elif isinstance(message, StepResult):
        core.apply(member, message, now)
    elif isinstance(message, DraftProposals):
        core.propose(message)
    elif kind == "lose":
        core.lose_worker(member)
    elif kind == "lose_draft":
        core.lose_draft(member)
    elif kind == "abort":
        core.abort(message.request_id)
    else:
        core.add(message, now=0.0)


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    print(*replay(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines(), Policy(max_num_batched_tokens=32)))
