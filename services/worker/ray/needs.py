"""What a group asks Ray for, and what it says while Ray does not have it.  Without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.config import EngineSettings

CPU, GPU = "CPU", "GPU"  # Ray's names
Resources = Mapping[str, float]


def rank_threads(engine: EngineSettings) -> int:
    """The threads of each rank, and the CPUs that it asks for: Ray counts these, so no rank takes a host's cores."""
    return engine.num_threads or 1


def rank_needs(engine: EngineSettings) -> dict[str, float]:
    """The bundle of one rank."""
    needs = {CPU: float(rank_threads(engine))}
    return {**needs, GPU: 1.0} if engine.device == "cuda" else needs


def shortage(needs: Resources, ranks: int, strategy: str, total: Resources, free: Resources, nodes: int) -> str:
    """Which resource is missing for `ranks` times `needs`.

    `total`, `free`: sums over the cluster's nodes; `nodes`: how many there are.
    """
    each = " and ".join(f"{amount:g} {name}" for name, amount in needs.items())
    wants = f"each of its {ranks} ranks needs {each}" if ranks > 1 else f"it needs {each}"
    for name, amount in needs.items():
        has = free.get(name, 0.0)
        if has < ranks * amount:
            return f"{wants}; Ray has {has:g} {name} free of {total.get(name, 0.0):g} on {count(nodes)}"
    if strategy == "strict_spread" and nodes < ranks:
        return f"{wants} on a node of its own (ray_placement=strict_spread); Ray has {count(nodes)}"
    names = " and ".join(needs)
    return f"{wants}; Ray has enough {names} free, but not in such pieces on its {count(nodes)} ({strategy})"


def count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def totals(nodes: Sequence[Resources]) -> dict[str, float]:
    """The sum of what nodes have."""
    found: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.items():
            found[name] = found.get(name, 0.0) + amount
    return found
