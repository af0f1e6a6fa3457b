"""From records to what is claimed: the figures of all engines, ratios to the best peer, and their targets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from scripts.bench.common.proc import has_bf16
from scripts.bench.common.report import Result
from scripts.bench.common.specs import FAMILIES
from scripts.bench.peers.catalog import CHAIN, FULL, INT4, INT8, OTHERS, OURS, RUNNER, RUNNER_INT8
from scripts.bench.peers.rounds import EngineRecord, paired_ratio
from scripts.bench.peers.workloads import WORKLOADS
from services.cli.display.tables import aligned

Records = Mapping[tuple[str, str], EngineRecord]  # by workload and engine
WarmUps = Mapping[tuple[str, str], float]  # seconds, by the same

RUNNER_TARGETS = {
    "S": {"a": 1.5, "b1": 1.4, "b2": 1.4, "c": 1.1, "d": 1.3},
    "M": {"a": 1.0, "b1": 1.25, "b2": 1.25, "c": 1.1, "d": 1.1},
    "moe": {"a": 1.2, "b1": 1.2, "c": 1.2},
    "gpt-oss": {"a": 1.2, "b1": 1.2, "c": 1.2},
    "gpt2": dict.fromkeys(WORKLOADS, 1.0),
    "gemma3": dict.fromkeys(WORKLOADS, 1.0),
}
CHAIN_TARGET = 1.0  # of what the runner has a target for
INT8_TARGETS = dict.fromkeys(WORKLOADS, 1.1)  # of S
INT4_TARGETS = {RUNNER: {"a": 1.5, "b1": 1.6, "c": 1.05}, CHAIN: {"a": 1.2, "b1": 1.4, "c": 1.0}}
INT4_OF_INT8 = 0.95  # of our own int8, 32 alike
FLOOR_TARGETS = {FULL: 0.8, INT8: 0.8, INT4: 0.85}  # of the speed that reading the weights once per token allows

# Where the processor multiplies bfloat16 peers are faster in 16 bits, and so are we.
BF16_RUNNER_TARGETS = RUNNER_TARGETS | {
    "S": {"b1": 1.4, "b2": 1.4, "c": 1.1, "d": 1.3},
    "M": {"b1": 1.35, "b2": 1.35, "c": 1.1, "d": 1.25},
}
BF16_CHAIN_TARGETS = {
    "S": {"a": 1.0, "b1": 1.3, "b2": 1.3, "c": 1.05, "d": 1.25},
    "M": {"a": 1.0, "b1": 1.25, "b2": 1.25, "c": 1.05, "d": 1.2},
}
BF16_INT8_TARGETS = {"a": 1.5, "b1": 1.8, "b2": 1.6, "c": 1.2, "d": 1.5}  # of S and M
BF16_FLOOR_TARGETS = FLOOR_TARGETS | {FULL: 0.95}
MEMORY_TARGET = 1.15  # of weights and KV pool
LEGEND = (
    "median (spread of n rounds) of the rounds in which others took at most 0.15 cores; ~: of all, since none was such;"
    " one round where hopeless"
)
OTHER_TARGET = 0.98  # of the runner of another checkout


def target(engine: str, model: str, quantization: str, workload: str, bf16: bool) -> float | None:
    """How many times the best peer an engine of ours is to be; None where nothing is asked.

    `bf16`: whether the processor multiplies bfloat16.
    """
    if engine not in (RUNNER, CHAIN):
        return None
    if quantization == INT4:
        return INT4_TARGETS[engine].get(workload)
    if quantization == INT8:
        if engine == CHAIN:
            return None
        if bf16:
            return BF16_INT8_TARGETS.get(workload)
        return INT8_TARGETS.get(workload) if model == "S" else None
    own = (BF16_RUNNER_TARGETS if bf16 else RUNNER_TARGETS)[model].get(workload)
    if engine == RUNNER:
        return own
    if bf16 and model in BF16_CHAIN_TARGETS:
        return BF16_CHAIN_TARGETS[model].get(workload)
    return own if own is None else CHAIN_TARGET


def best_peer(records: Records, workload: str) -> tuple[str, EngineRecord] | None:
    """The fastest by its median; None where no peer finished."""
    peers = [(engine, r) for (name, engine), r in records.items() if name == workload and engine not in OURS]
    return max(peers, key=lambda pair: pair[1].speed, default=None)


def engine_table(records: Records, versions: Mapping[str, str], title: str) -> str:
    """A row per engine, a column per workload: median, spread, number of rounds."""
    names = [name for name in WORKLOADS if any(name == workload for workload, _ in records)]

    def cell(engine: str, name: str) -> str:
        record = records.get((name, engine))
        return f"{shown(record)} ({100 * record.spread:.0f} % of {len(record.counted)})" if record else "-"

    head = ["engine", *(f"{name}, {WORKLOADS[name].unit}" for name in names), "version"]
    rows = [[engine, *(cell(engine, name) for name in names), version] for engine, version in versions.items()]
    return "\n".join([title, aligned(head, rows), LEGEND])


def ratio_lines(
    records: Records, model: str, quantization: str, warm_ups: WarmUps = MappingProxyType({})
) -> list[Result]:
    """One line for each engine of ours and workload that was run; of warm-ups where they left no peer to run it."""
    played = [name for name in WORKLOADS if any(name == workload for workload, _ in records)]
    lines = [ratio_line(records, model, quantization, e, name, warm_ups) for e in (RUNNER, CHAIN) for name in played]
    if ("b1", RUNNER) in records and ("b1", RUNNER_INT8) in records:
        what = f"{RUNNER} {quantization} / int8, {model}"
        lines.append(_versus(records, "b1", RUNNER, RUNNER_INT8, what, INT4_OF_INT8))
    return lines


def pair_lines(records: Records, model: str, engines: Collection[str], workloads: Sequence[str]) -> list[Result]:
    """One line for each engine of ours and workload: this checkout's against the other's; missed without a figure."""
    return [
        _versus(records, name, own, OTHERS[own], f"{own} / the other checkout's, {model}", OTHER_TARGET)
        for own in OTHERS
        if own in engines
        for name in workloads
    ]


def _versus(records: Records, workload: str, engine: str, other: str, what: str, bound: float) -> Result:
    """Two engines of ours, round by round; the note has the medians."""
    what = f"{what}, {workload} ({WORKLOADS[workload].what})"
    own, found = records.get((workload, engine)), records.get((workload, other))
    if own is None or found is None:
        return Result(what, None, "x", at_least=bound, note="no figure")
    note = f"{shown(own)} against {shown(found)} {WORKLOADS[workload].unit}"
    return Result(what, paired_ratio(own, found), "x", at_least=bound, note=note)


def ratio_line(
    records: Records, model: str, quantization: str, engine: str, workload: str, warm_ups: WarmUps
) -> Result:
    """Missed where either side has no figure."""
    kind = "" if quantization == FULL else f" {quantization}"
    what = f"{engine}{kind} / best peer, {model}, {workload} ({WORKLOADS[workload].what})"
    bound = target(engine, model, quantization, workload, has_bf16())
    own, best = records.get((workload, engine)), best_peer(records, workload)
    peers = {seconds: name for (played, name), seconds in warm_ups.items() if played == workload and name not in OURS}
    if own is not None and best is None and peers and (warm := warm_ups.get((workload, engine))):
        note = f"of the warm-ups: {warm:.2f} against {min(peers):.2f} s of {peers[min(peers)]}"
        return Result(what, min(peers) / warm, "x", at_least=bound, note=note)
    if own is None or best is None:
        return Result(what, None, "x", at_least=bound, note="no figure of ours" if own is None else "no peer")
    note = f"{shown(own)} against {shown(best[1])} {WORKLOADS[workload].unit} of {best[0]}"
    return Result(what, own.speed / best[1].speed, "x", at_least=bound, note=note)


def shown(record: EngineRecord) -> str:
    """The median in the workload's unit; `~` where no run was quiet."""
    value = record.workload.told(record.speed)
    return f"{'~' if record.is_noisy else ''}{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def floor_line(records: Records, model: str, quantization: str, streamed: int, bandwidth: float) -> Result:
    """Decoding at batch 1 against reading `streamed` bytes of weights per token at `bandwidth` bytes per second."""
    what = f"{RUNNER}, {model}, decode at batch 1 / memory floor"
    targets = BF16_FLOOR_TARGETS if has_bf16() else FLOOR_TARGETS
    record, bound = records.get(("a", RUNNER)), targets[quantization] if model in FAMILIES["dense"] else None
    if record is None or not record.decode_seconds:
        return Result(what, None, at_least=bound)
    num_steps = WORKLOADS["a"].requests(0, 1000)[0][1] - 1
    per_token, floor = record.decode_seconds / num_steps, streamed / bandwidth
    note = (
        f"{1e3 * per_token:.2f} ms per token, {streamed / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s = {1e3 * floor:.2f}"
    )
    return Result(what, floor / per_token, at_least=bound, note=note)


def memory_line(engine: str, model: str, peak_rss: int, weights: int, pool: int) -> Result:
    """The worker's peak resident size against what it has to hold."""
    what = f"{engine}, {model}, peak RSS / (weights + KV pool)"
    note = f"{peak_rss / 1e6:,.0f} MB of {weights / 1e6:,.0f} + {pool / 1e6:,.0f}"
    return Result(what, peak_rss / (weights + pool), at_most=MEMORY_TARGET, note=note)
