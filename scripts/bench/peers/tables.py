"""The figures of all engines as a table, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts.bench.peers.figures import Records, best_peer, shown
from scripts.bench.peers.rounds import EngineRecord
from scripts.bench.peers.workloads import WORKLOADS


def engine_table(records: Records, versions: Mapping[str, str], title: str) -> str:
    """A row per engine, a column per workload: median, spread, number of rounds."""
    names = _played(records)
    header = ["engine", *(f"{name}, {WORKLOADS[name].unit}" for name in names), "version"]
    rows = [[engine, *(_cell(records.get((name, engine))) for name in names), versions[engine]] for engine in versions]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(f"{cell:{'<' if not i else '>'}{widths[i]}}" for i, cell in enumerate(r)) for r in [header, *rows]
    ]
    legend = "median (spread of n rounds); ~: others took more than 0.15 cores in some round; one round where hopeless"
    return "\n".join([title, *lines, legend])


def readme_table(records: Records, versions: Mapping[str, str], title: str) -> str:
    """The same in Markdown, the best peer of each column in bold."""
    names = _played(records)
    best = {name: found[0] for name in names if (found := best_peer(records, name))}
    rows = [
        ["engine", *(f"{name}: {WORKLOADS[name].what}, {WORKLOADS[name].unit}" for name in names)],
        ["---", *("---:" for _ in names)],
        *([engine, *(_bold(records.get((n, engine)), best.get(n) == engine) for n in names)] for engine in versions),
    ]
    return "\n".join([title, "", *(f"| {' | '.join(row)} |" for row in rows)])


def _played(records: Records) -> Sequence[str]:
    return [name for name in WORKLOADS if any(name == workload for workload, _ in records)]


def _cell(record: EngineRecord | None) -> str:
    if record is None:
        return "-"
    return f"{shown(record)} ({100 * record.spread:.0f} % of {len(record.runs)})"


def _bold(record: EngineRecord | None, best: bool) -> str:
    if record is None:
        return "-"
    return f"**{shown(record)}**" if best else shown(record)
