"""The figures of all engines as a table, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts.bench.common.report import markdown
from scripts.bench.peers.figures import Records, best_peer, shown
from scripts.bench.peers.workloads import WORKLOADS
from services.cli.tables import aligned

LEGEND = "median (spread of n rounds); ~: others took more than 0.15 cores in some round; one round where hopeless"


def engine_table(records: Records, versions: Mapping[str, str], title: str) -> str:
    """A row per engine, a column per workload: median, spread, number of rounds."""
    names = _played(records)

    def cell(engine: str, name: str) -> str:
        record = records.get((name, engine))
        return f"{shown(record)} ({100 * record.spread:.0f} % of {len(record.runs)})" if record else "-"

    head = ["engine", *(f"{name}, {WORKLOADS[name].unit}" for name in names), "version"]
    rows = [[engine, *(cell(engine, name) for name in names), version] for engine, version in versions.items()]
    return "\n".join([title, aligned(head, rows), LEGEND])


def readme_table(records: Records, versions: Mapping[str, str], title: str) -> str:
    """The same in Markdown, the best peer of each column in bold."""
    names = _played(records)
    best = {name: found[0] for name in names if (found := best_peer(records, name))}

    def cell(engine: str, name: str) -> str:
        record = records.get((name, engine))
        text = shown(record) if record else "-"
        return f"**{text}**" if best.get(name) == engine else text

    head = ["engine", *(f"{name}: {WORKLOADS[name].what}, {WORKLOADS[name].unit}" for name in names)]
    return f"{title}\n\n{markdown(head, [[engine, *(cell(engine, name) for name in names)] for engine in versions])}"


def _played(records: Records) -> Sequence[str]:
    return [name for name in WORKLOADS if any(name == workload for workload, _ in records)]
