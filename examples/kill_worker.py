"""Kills the worker in mid-stream: python -m examples.kill_worker PID [ADDRESS]

The answer must equal an undisturbed one.  PID is the process of the worker: `pgrep -f services.worker`.
`pageant serve` starts another worker, and the stream continues.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from shared.client import Client

PROMPT, MAX_TOKENS = "Once upon a time", 400


async def answer(address: str, pid: int | None) -> tuple[str, float]:
    """The text of a greedy answer, and the longest pause in its stream; kills `pid` after 100 characters."""
    text, longest, last = "", 0.0, time.monotonic()
    async with Client(address) as client, client.stream(PROMPT, temperature=0.0, max_tokens=MAX_TOKENS) as stream:
        async for delta in stream:
            now = time.monotonic()
            text, longest, last = text + delta.text, max(longest, now - last), now
            if pid is not None and len(text) > 100:
                os.kill(pid, signal.SIGKILL)
                pid = None
    if pid is not None:
        raise RuntimeError("the answer was over before the worker could be killed")
    return text, longest


async def main(pid: int, address: str) -> int:
    undisturbed, _ = await answer(address, None)
    killed, pause = await answer(address, pid)
    is_same = killed == undisturbed
    print(f"a pause of {pause:.1f} s; the two answers {'are equal' if is_same else 'differ'}: {len(killed)} characters")
    return 0 if is_same else 1


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(asyncio.run(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:50051")))
