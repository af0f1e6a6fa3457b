"""Tokens per second through tokenizer, scheduler, detokenizer, gateway and gRPC, and what each service takes of it.

    scripts/bench_streams [--check] [--streams 1024] [--seconds 20] [--step-ms 25]

All are real processes with real messages on this machine's cores; only the worker is a stand-in, which takes a fixed
time per step.  Clients in one process more hold the streams open, send one request after the other and check every
token.  A service's figure is its processor time in the measured window (user and system, from /proc) over the tokens
that clients received in it; the tokens per second are theirs too, and the clients and the stand-in share the cores.
First, without load, what each service takes of a core, and what the chain adds to the first token of a lone request.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import msgspec

from scripts.bench.first_token import added_to_first_token
from scripts.bench.report import Result, add_check, finish
from scripts.bench.troupe import LocalDeployment, ProcessUsage, troupe, usage

TARGET_TOKENS, TARGET_FIRST_MS = 20_000.0, 3.0
MAX_IDLE = 10.0  # milliseconds of processor time per second
MAX_GROWTH = 8.0  # MiB of resident memory, from the middle of the load to its end; 40 bytes a token would be more
WARM_SECONDS = 5.0
PATIENCE = 60.0  # for the last requests to end
CLIENTS = "clients"


class StreamSample(msgspec.Struct):
    """One moment: what clients had received, and every process's usage."""

    time: float
    tokens: int
    messages: int
    usages: dict[str, ProcessUsage]


def idle(running: LocalDeployment, seconds: float) -> list[Result]:
    """Milliseconds of processor time per second of each service that has nothing to do."""
    time.sleep(1)
    before, start = running.usages(), time.monotonic()
    time.sleep(seconds)
    after, elapsed = running.usages(), time.monotonic() - start
    spent = {name: 1000 * (after[name].seconds - before[name].seconds) / elapsed for name in before}
    return [Result(f"idle: {name}", ms, "ms/s", at_most=MAX_IDLE) for name, ms in spent.items()]


def load(running: LocalDeployment, args: argparse.Namespace) -> tuple[list[StreamSample], list[str], int]:
    """Samples once a second while all streams are busy, what went wrong, and how many requests were finished."""
    command = [sys.executable, "-m", "scripts.bench.clients", "--address", running.address]
    for name in ("streams", "seconds", "tokens", "channels"):
        command += [f"--{name}", str(getattr(args, name))]
    samples: list[StreamSample] = []
    said: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE) as clients:
        assert clients.stdout is not None
        begun = time.monotonic()
        try:
            for line in clients.stdout:
                said = json.loads(line)
                usages = running.usages() | {CLIENTS: usage(clients.pid)}
                samples.append(StreamSample(said["time"], said["tokens"], said["messages"], usages))
                if time.monotonic() - begun > args.seconds + PATIENCE:
                    raise RuntimeError(f"the streams do not end: {said}")
        finally:
            clients.kill()
    # The last line is that of a process about to end, and the seconds after the time are no full load.
    busy = [sample for sample in samples[:-1] if WARM_SECONDS <= sample.time - samples[0].time <= args.seconds]
    return busy, said["wrong"], said["finished"]


def lines_of(samples: list[StreamSample], wrong: list[str], finished: int, args: argparse.Namespace) -> list[Result]:
    first, middle, last = samples[0], samples[len(samples) // 2], samples[-1]
    elapsed, tokens = last.time - first.time, max(1, last.tokens - first.tokens)
    lines = []
    for name in first.usages:
        spent = last.usages[name].seconds - first.usages[name].seconds
        note = f"{100 * spent / elapsed:.0f}% of a core"
        lines.append(Result(f"{name}: processor time per token", 1e6 * spent / tokens, "us", note=note))
    for name in first.usages:
        mib = [sample.usages[name].resident / 2**20 for sample in (first, middle, last)]
        note = "MiB at start, middle, end: " + ", ".join(f"{value:.0f}" for value in mib)
        bound = MAX_GROWTH if name != CLIENTS else None
        lines.append(Result(f"{name}: memory grown since the middle", mib[2] - mib[1], "MiB", at_most=bound, note=note))
    lines.append(Result("tokens per gRPC message", tokens / max(1, last.messages - first.messages)))
    lines.append(
        Result("wrong streams", len(wrong), at_most=0, note=f"of {finished}" + "".join(f"; {w}" for w in wrong))
    )
    rate = tokens / elapsed
    lines.append(Result(f"tokens per second, {args.streams} streams", rate, "/s", at_least=TARGET_TOKENS))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--step-ms", type=float, default=25)
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--channels", type=int, default=16, help="connections that the streams share")
    parser.add_argument("--idle-seconds", type=float, default=10, help="0: leave that part out, and the first token's")
    args = parser.parse_args()
    lines = []
    if args.idle_seconds:
        with troupe(0.0) as running:
            lines += idle(running, args.idle_seconds)
            lines += added_to_first_token(running.address, at_most=TARGET_FIRST_MS)
    with troupe(args.step_ms, max_num_seqs=args.streams, log_level="warning") as running:
        lines += lines_of(*load(running, args), args)
    title = f"{args.streams} streams, steps of {args.step_ms:g} ms, {os.cpu_count()} cores shared by all"
    return finish(lines, check=args.check, title=title)


if __name__ == "__main__":
    sys.exit(main())
