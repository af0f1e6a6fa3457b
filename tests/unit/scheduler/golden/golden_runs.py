"""Fixed golden runs of events, and everything that a scheduler says in them.

python -m tests.unit.scheduler.golden.golden_runs NAME     prints what is said, for comparison with another version
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from zlib import crc32

import msgspec

from services.scheduler.draft_length.controller import DraftLengthController
from services.scheduler.draft_length.modes import modes_of, yields
from services.scheduler.load import replica_snapshot
from services.scheduler.state.policy import Policy
from tests.unit.scheduler.worlds.fake_draft import FakeDraft
from tests.unit.scheduler.worlds.golden_world import GoldenRun, said
from tests.unit.scheduler.worlds.storm import TamperedStorm

DIGITS = 4  # of a digest
GROUP = 4  # events that one digest is of


def shares() -> list[str]:
    """Three tenants of different weight want more rows and blocks than there are."""
    lines: list[str] = []
    for seed, weights in enumerate(("large=2,small=0.5", "", "small=4")):
        policy = Policy(max_num_batched_tokens=24, tenant_weights=weights, fair_prefill_tokens=12)
        golden = GoldenRun(policy, 1, seed, num_blocks=24, max_num_seqs=5, max_model_len=96)
        for index in range(260):
            golden.ask() if index % 8 == 0 else golden.turn()
        lines += golden.finish()
    return lines


def priorities() -> list[str]:
    """Several workers, prompts in chunks, little room: what is urgent goes ahead."""
    lines: list[str] = []
    for seed, routing in enumerate(("least_loaded", "prefix_aware", "round_robin")):
        policy = Policy(
            max_num_batched_tokens=20, long_prefill_token_threshold=9, scheduling_policy="priority",
            priority_ageing=2.0, routing_policy=routing,
        )  # fmt: skip
        golden = GoldenRun(policy, 2, seed, num_blocks=14, max_num_seqs=4, max_model_len=96)
        for index in range(220):
            golden.ask() if index % 9 == 0 else golden.turn()
        lines += golden.finish()
    return lines


def losses() -> list[str]:
    """Workers of several sizes and kinds come and go, clients too."""
    lines: list[str] = []
    variants: list[dict[str, Any]] = [{}, {"enable_prefix_caching": False}, {"enable_chunked_prefill": False}, {}]
    for seed, variant in enumerate(variants):
        policy = Policy(max_num_batched_tokens=32, **variant)
        golden = GoldenRun(policy, 2, seed, num_blocks=20, max_num_seqs=6, max_model_len=96)
        golden.acknowledges = bool(seed % 2)
        for index in range(500):
            if index % 11 == 0:
                golden.ask() if index % 3 else golden.look()
            elif index % 7 == 0:
                golden.cut()
            elif index % 19 == 0:
                golden.change()
            else:
                golden.turn()
        lines += golden.finish()
    return lines


def drafts() -> list[str]:
    """Draft tokens, as many as measured times make worth it; drafts that forget, come and go."""
    golden = GoldenRun(Policy(max_num_batched_tokens=64), 1, 4, num_blocks=64, max_num_seqs=6, max_model_len=128)
    golden.join_draft("d", FakeDraft(skill=0.9, forgets=0.02))
    for index in range(700):
        if index == 300:
            golden.join_draft("e", FakeDraft(1, skill=0.5, num_rows=2))
        if index == 500:
            golden.lose_draft("d")
        if index % 20 == 0:
            golden.ask(max_tokens=60, ignore_eos=True, stop_token_ids=[])
        golden.turn()
        golden.draft()
    return golden.finish()


def fixed_drafts() -> list[str]:
    """A fixed number of draft tokens, among requests that are cut and workers that die."""
    lines: list[str] = []
    for seed, acceptance in enumerate(("rejection", "coupled", "coupled")):
        policy = Policy(max_num_batched_tokens=24, num_draft_tokens=3, acceptance=acceptance)
        golden = GoldenRun(policy, 2, seed, num_blocks=16, max_num_seqs=4, max_model_len=96)
        golden.join_draft("d", FakeDraft(2, skill=0.7, num_rows=3, forgets=0.05 * seed))
        for index in range(240):
            if index % 9 == 0:
                golden.ask()
            elif index % 13 == 0:
                golden.cut()
            elif index % 41 == 0:
                golden.change()
            golden.turn()
            golden.draft()
        lines += golden.finish()
    return lines


def beams() -> list[str]:
    """Searches beside samples."""
    lines: list[str] = []
    for seed in range(3):
        golden = GoldenRun(Policy(max_num_batched_tokens=32), 1, seed, num_blocks=24, max_num_seqs=6, max_model_len=96)
        for index in range(200):
            if index % 14 == 0:
                golden.search()
            elif index % 33 == 0:
                golden.ask(n=1, logprobs=2)
            elif index % 29 == 0:
                golden.cut()
            golden.turn()
        lines += golden.finish()
    return lines


def states() -> list[str]:
    """Workers that keep states: snapshots are taken, found and given away; searches and drafts beside samples."""
    lines: list[str] = []
    for seed in range(3):
        policy = Policy(max_num_batched_tokens=48, num_draft_tokens=3)
        golden = GoldenRun(policy, 1, seed, num_blocks=30, max_num_seqs=6, max_model_len=128, num_snapshots=3 + seed)
        golden.join_draft("d", FakeDraft(2, skill=0.7, num_rows=3))
        for index in range(240):
            if index % 14 == 0:
                golden.search()
            elif index % 9 == 0:
                golden.ask()
            elif index % 29 == 0:
                golden.cut()
            golden.turn()
            golden.draft()
        lines += golden.finish()
    return lines


class NotedStorm(TamperedStorm):
    """A storm of which the ledgers are written down behind each event."""

    background_shares = (0.0,)

    def __init__(self, seed: int) -> None:
        self.lines: list[str] = []
        super().__init__(seed)

    def event(self) -> None:
        super().event()
        core, held = self.world.scheduler, []
        for replica in core.replicas.values():
            pool = replica.pool
            names = [name and name.hex()[:4] for name in pool.hashes]
            held += [list(pool.available), pool.ref_counts, pool.generations, names, pool.num_evictions]
            held += [replica.free_rows, replica.released_rows, replica_snapshot(replica)]
        notes = [[note.event, note.header.request_id, note.fields] for note in core.journal.take()]
        self.lines.append(msgspec.json.encode(said([held, notes, asdict(core.counters)])).decode())


def ledgers() -> list[str]:
    """Links that lose and repeat, ledgers that go wrong and are set right."""
    lines: list[str] = []
    for seed in (3, 8):
        storm = NotedStorm(seed)
        storm.run(700)
        lines += storm.lines
    return lines


def choices() -> list[str]:
    """How many draft tokens, on machines whose steps change what they take, now and then at once."""
    lines: list[str] = []
    for seed, modes in enumerate((modes_of(0, 8), modes_of(0, 8), modes_of(0, 3), modes_of(2, 8))):
        r, controller, factor, plain = random.Random(seed), DraftLengthController(modes), 1.0, 0.01
        for step in range(6000):
            if step % 1300 == 1299:
                factor, plain = r.choice([0.2, 0.5, 3.0]), r.choice([0.002, 0.01, 0.02])
            mode = controller.mode
            count = mode.num_draft_tokens
            seconds = plain + factor * (0.004 * bool(count) + count * (0.001 if mode.runs_ahead else 0.0016))
            controller.record(seconds * r.gauss(1.0, 0.05), count * r.choice([0.5, 1.0]))
            if controller.is_due:
                controller.choose(yields([0.4 + 0.1 * (seed % 2), 0.8], 8), 0.0005 * (step % 3))
                known = [round(controller.seconds(one), 9) for one in modes]
                lines.append(f"{seed} {step} {controller.mode} {known}")
        lines.append(f"{seed} {controller.mode} {[cost.num_trials for cost in controller.costs.values()]}")
    return lines


GOLDEN_RUNS: dict[str, Callable[[], list[str]]] = {
    golden.__name__: golden
    for golden in (shares, priorities, losses, drafts, fixed_drafts, beams, states, ledgers, choices)
}


def digests(lines: list[str]) -> list[str]:
    """DIGITS hexadecimal digits for each GROUP of lines."""
    groups = ("\n".join(lines[at : at + GROUP]) for at in range(0, len(lines), GROUP))
    return [f"{crc32(group.encode()) & 0xFFFF:0{DIGITS}x}" for group in groups]


if __name__ == "__main__":
    print("\n".join(GOLDEN_RUNS[sys.argv[1]]()))
