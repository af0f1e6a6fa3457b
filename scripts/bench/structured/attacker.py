"""Sends hostile grammars, one after the other: a process of its own, so that what it does is not its victims' time.

    python -m scripts.bench.structured.attacker --address HOST:PORT [--salts 60]

Reads from each line of its input what to send (hostile or harmless formats, or plain requests), for how many seconds,
and how many seconds lie between two of them at least; does so and prints what came of it as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from scripts.bench.structured.hostile import hostile
from shared.client import CallError, Client

FEW_TOKENS = 8  # of a hostile request that is served after all
TIMEOUT = 20.0  # seconds
SERVED = "served"

Grammars = Iterator[tuple[str, dict[str, Any]]]


async def attack(client: Client, grammars: Grammars, seconds: float, pace: float) -> dict[str, Any]:
    """How many requests ended how, and how long the longest of each kind took; `pace`: seconds from one to the next, at
    least."""
    slowest: dict[str, float] = {}
    endings: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        name, grammar = next(grammars)
        begin = time.perf_counter()
        endings[await _ending(client, grammar)] += 1
        took = time.perf_counter() - begin
        slowest[name] = max(slowest.get(name, 0.0), took)
        await asyncio.sleep(max(0.0, pace - took))
    return {"slowest": slowest, "endings": endings}


async def _ending(client: Client, grammar: dict[str, Any]) -> str:
    try:
        await client.generate("Once", grammar=grammar or None, max_tokens=FEW_TOKENS, timeout=TIMEOUT)
    except CallError as error:
        return error.code if isinstance(error.code, str) else error.code.name
    return SERVED


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--salts", type=int, default=60, help="sets of grammars made before the first attack")
    args = parser.parse_args()
    made = [pair for salt in range(args.salts) for pair in hostile(salt).items()]
    harmless = (("harmless", {"regex": f"[a-z ,.]+{number}"}) for number in itertools.count())
    plain: Grammars = itertools.repeat(("plain", {}))
    async with Client(args.address) as client, Client(args.address, tenant="harmless") as other:  # who has no debt
        kinds = {"hostile": (client, itertools.cycle(made)), "harmless": (other, harmless), "plain": (other, plain)}
        print(json.dumps(len(made)), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            kind, seconds, pace = line.split()
            print(json.dumps(await attack(*kinds[kind], float(seconds), float(pace))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
