"""Plays a recorded mailbox to a fresh core and says what plans come out:  python -m tests.unit.scheduler.replay FILE

One JSON line per event: its kind, a worker's name where it concerns one, and the message's own bytes, in hex.
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
from shared.messages import Decoder, Hello, Message, SchedulerInbox, StepResult, encode


def record(kind: str, worker: str = "", message: Message | None = None) -> str:
    """One line of a recording."""
    return json.dumps([kind, worker, encode(message).hex() if message is not None else ""])


def replay(lines: Iterable[str], policy: Policy) -> tuple[int, str]:
    """The number of plans, and a digest over all their bytes."""
    core, decoder = Scheduler(policy), Decoder[Any](SchedulerInbox)
    core.set_detokenizers(["d0"])
    digest, num_plans = sha256(), 0
    for line in lines:
        kind, worker, data = json.loads(line)
        message = decoder.decode(bytes.fromhex(data)) if data else None
        if kind == "plan":
            plan = core.schedule(worker)
            if plan is not None:
                digest.update(encode(plan))
                num_plans += 1
        else:
            handle(core, kind, worker, message)
    return num_plans, digest.hexdigest()


def handle(core: Scheduler, kind: str, worker: str, message: Any) -> None:
    if isinstance(message, Hello) and message.worker is not None:
        core.add_worker(worker, message.epoch, message.worker)
    elif isinstance(message, StepResult):
        core.apply(worker, message)
    elif kind == "lose":
        core.lose_worker(worker)
    elif kind == "abort":
        core.abort(message.request_id)
    else:
        core.add(message, now=0.0)


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    print(*replay(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines(), Policy(max_num_batched_tokens=32)))
