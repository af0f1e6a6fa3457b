"""The figures of all engines as a table."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.bench.peers.figures import Records, shown
from scripts.bench.peers.workloads import WORKLOADS
from services.cli.tables import aligned

LEGEND = "median (spread of n rounds); ~: others took more than 0.15 cores in some round; one round where hopeless"


def engine_table(records: Records, versions: Mapping[str, str], title: str) -> str:
    """A row per engine, a column per workload: median, spread, number of rounds."""
    names = [name for name in WORKLOADS if any(name == workload for workload, _ in records)]

    def cell(engine: str, name: str) -> str:
        record = records.get((name, engine))
        return f"{shown(record)} ({100 * record.spread:.0f} % of {len(record.runs)})" if record else "-"

    head = ["engine", *(f"{name}, {WORKLOADS[name].unit}" for name in names), "version"]
    rows = [[engine, *(cell(engine, name) for name in names), version] for engine, version in versions.items()]
    return "\n".join([title, aligned(head, rows), LEGEND])
