"""Which ranks have which experts of a layer whole, by how many rows go to each, and the moves that lead there.

As the expert-parallel load balancer of DeepSeek-V3 has it (DeepSeek-AI, "EPLB", 2025): experts that many rows take are
there more than once, and what a rank has is packed so that all ranks compute about as many rows.  Here no rank has more
experts than at its start, and moves exchange experts, so none needs memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from kernels.cpu.binding.ranks import ExpertMove

Held = list[set[int]]  # the experts of each rank


def rank_loads(loads: Sequence[float], held: Held) -> list[float]:
    """Rows that each rank computes: those of an expert that several ranks have are divided among them."""
    copies = _copies(held)
    return [sum(loads[expert] / copies[expert] for expert in one) for one in held]


def balance(loads: Sequence[float], held: Held) -> float:
    """The mean of the ranks' loads as a part of the largest: 1 where no rank waits for another."""
    each = rank_loads(loads, held)
    return sum(each) / len(each) / max(each) if max(each) else 1.0


def place(loads: Sequence[float], held: Held) -> Held:
    """Where experts are to be, each rank having as many as in `held`.

    The heaviest goes first to the rank that has the least so far; among equal ranks to one that has it already.
    """
    rooms = [len(one) for one in held]
    copies = _replicate(loads, sum(rooms), len(held))
    target: Held = [set() for _ in held]
    filled = [0.0] * len(held)
    heaviest = sorted(range(len(loads)), key=lambda expert: (-loads[expert] / copies[expert], expert))
    for expert in (one for one in heaviest for _ in range(copies[one])):
        able = [rank for rank, one in enumerate(target) if len(one) < rooms[rank] and expert not in one]
        if able:  # always for a first copy
            rank = min(able, key=lambda rank: (filled[rank], expert not in held[rank], rank))
            target[rank].add(expert)
            filled[rank] += loads[expert] / copies[expert]
    for rank, one in enumerate(target):  # where there is room, but only for experts that it has
        spare = (expert for expert in heaviest if expert not in one)
        one.update(expert for expert, _ in zip(spare, range(rooms[rank] - len(one)), strict=False))
    return target


def moves_between(held: Held, target: Held) -> Iterator[list[ExpertMove]]:
    """Orders that lead from one placement to the other, of one or two moves each; none leaves an expert nowhere."""
    now = [set(one) for one in held]
    while (order := _next_order(now, target)) is not None:
        yield order
        for move in order:
            now[move.target].remove(move.dropped)
        for move in order:
            now[move.target].add(move.expert)


def _next_order(now: Held, target: Held) -> list[ExpertMove] | None:
    """Each puts at least one expert where it is to be."""
    lacks, extras = ([a - b for a, b in zip(*both, strict=True)] for both in ((target, now), (now, target)))
    copies = _copies(now)
    for rank, lacking in enumerate(lacks):
        for expert in sorted(lacking):
            giver = next((other for other, one in enumerate(extras) if expert in one), None)
            if giver is not None and (swapped := sorted(extras[rank] - now[giver])):
                dropped = swapped[0]
                return [ExpertMove(expert, giver, dropped, rank), ExpertMove(dropped, rank, expert, giver)]
            spare = sorted(one for one in extras[rank] if copies[one] > 1)
            if spare:
                source = next(other for other, one in enumerate(now) if expert in one)
                return [ExpertMove(expert, source, spare[0], rank)]
    return None


def _copies(held: Held) -> Counter[int]:
    return Counter(chain.from_iterable(held))


def _replicate(loads: Sequence[float], rooms: int, ranks: int) -> list[int]:
    """How often each expert is there: once more, as long as there is room, for the one whose copies have most to do."""
    copies = [1] * len(loads)
    for _ in range(rooms - len(loads)):
        able = [expert for expert, count in enumerate(copies) if count < ranks]
        copies[max(able, key=lambda expert: (loads[expert] / copies[expert], -expert))] += 1
    return copies
