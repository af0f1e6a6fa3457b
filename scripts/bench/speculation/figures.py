"""From records to what is claimed: never worse than the best of the other arms, and what the draft's cost foretells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median

from scripts.bench.common.report import Result, figure
from scripts.bench.speculation.arms import ADAPTIVE, ASKED, NONE
from scripts.bench.speculation.contest import ModeRecord, Records
from scripts.bench.speculation.costs import PLAIN, Costs

NEVER_WORSE = 0.97  # of the better of no speculation and the best fixed number
WORTH = 1.0  # of no speculation, at batch 1, where the draft's cost and acceptance allow it
MADE_WORTH = 1.8  # the same, of the made pair
GAP = 0.15  # between the foretold and the reached speed-up: beyond it, where the time went is told
MS = 1e3
LEGEND = (
    "tokens/s, medians (spread of the rounds); ~: others took more than 0.15 cores in some round; adaptive / best "
    "other: by medians of speeds relative to their round's mean; acceptance, draft length: the adaptive arm's"
)


@dataclass(frozen=True)
class Foretold:
    """A speed-up at batch 1 that follows from what was measured, and the step that it rests on, in seconds.

    One step verifies k draft tokens and yields `num_tokens`; it takes what a plain step of the whole chain takes, what
    verifying adds to the model's step, and what drafting takes.  `asking` is no part of it: what a step takes longer
    where a draft is asked that has no answer, for the messages, and because no second step is in flight meanwhile.
    """

    plain: float
    verifying: float
    drafting: float
    num_tokens: float
    asking: float

    @property
    def step(self) -> float:
        return self.plain + self.verifying + self.drafting

    @property
    def speed_up(self) -> float:
        return self.num_tokens * self.plain / self.step

    @property
    def speed_up_with_asking(self) -> float:
        return self.num_tokens * self.plain / (self.step + self.asking)


def foretell(records: Records, num_drafts: int, target: Costs, draft: Costs) -> Foretold:
    """For the arm of `num_drafts` draft tokens, against the one without."""
    record, plain = records[1, f"k={num_drafts}"], records[1, NONE.name]
    return Foretold(
        plain=1 / plain.speed,
        verifying=target[num_drafts] - target[PLAIN],
        drafting=draft[num_drafts],
        num_tokens=record.tokens_per_draft,
        asking=max(0.0, 1 / records[1, ASKED.name].speed - 1 / plain.speed),
    )


def adaptive_worth(records: Records, num_streams: int) -> tuple[float, str]:
    """The adaptive arm's speed of that of the best other, and which that is.

    In each round, whose turns are near enough in time to be alike, the arm is held against the one that was the best of
    all *other* rounds; the median of the rounds.  The best of the same rounds would be the luckiest of several arms
    that differ by less than chance does, and not even that arm itself would reach its figure again.
    """
    arms = {name: r.runs for (streams, name), r in records.items() if streams == num_streams and name != ASKED.name}
    own = [run.speed for run in arms.pop(ADAPTIVE.name)]
    rounds = [{name: runs[index].speed for name, runs in arms.items()} for index in range(len(own))]
    ratios = [
        speed / others[_best(rounds[:index] + rounds[index + 1 :] or rounds)]
        for index, (speed, others) in enumerate(zip(own, rounds, strict=True))
    ]
    return median(ratios), _best(rounds)


def _best(rounds: Sequence[Mapping[str, float]]) -> str:
    """The arm whose speed, relative to the mean of its round, has the largest median: the machine's speed drifts from
    round to round by more than arms differ, and within a round by less."""
    means = [geometric_mean(speeds.values()) for speeds in rounds]
    relative = {
        name: median(speeds[name] / mean for speeds, mean in zip(rounds, means, strict=True)) for name in rounds[0]
    }
    return max(relative, key=lambda name: relative[name])


def never_worse_lines(records: Records, pair: str) -> list[Result]:
    """One line for each number of streams."""
    lines = []
    for streams in sorted({streams for streams, _ in records}):
        worth, best = adaptive_worth(records, streams)
        speeds = (figure(records[streams, name].speed) for name in (ADAPTIVE.name, best))
        what = f"{pair}, {streams} streams: adaptive / max(none, best fixed)"
        note = "{} against {} tokens/s of {}".format(*speeds, best)
        lines.append(Result(what, worth, "x", at_least=NEVER_WORSE, note=note))
    return lines


def lone_lines(
    records: Records, pair: str, lengths: Sequence[int], target: Costs, draft: Costs, at_least: float | None = None
) -> list[Result]:
    """What was foretold and reached at batch 1, for each fixed number of draft tokens and for the adaptive arm.

    The adaptive arm is to be above 1 where the best that is foretold is, or above `at_least`.
    """
    plain, own = records[1, NONE.name], records[1, ADAPTIVE.name]
    lines, best = [], 1.0
    for length in lengths:
        record = records[1, f"k={length}"]
        foretold = foretell(records, length, target, draft)
        best = max(best, foretold.speed_up)
        reached = record.speed / plain.speed
        note = f"foretold {figure(foretold.speed_up)} x{explanation(foretold, record, reached)}"
        lines.append(Result(f"{pair}, 1 stream: k={length} / none", reached, "x", note=note))
    reached = own.speed / plain.speed
    wanted = at_least or (WORTH if best > 1 else None)
    note = f"foretold {figure(best)} x" + ("" if best > 1 else ", so drafts are not worth their cost")
    if abs(reached / best - 1) > GAP:
        note += f"; gap {100 * (reached / best - 1):+.0f} %, see the lines above"
    return [*lines, Result(f"{pair}, 1 stream: adaptive / none", reached, "x", at_least=wanted, note=note)]


def explanation(foretold: Foretold, record: ModeRecord, reached: float) -> str:
    """Where a step's time went, where the gap is too large to leave it at that."""
    gap = reached / foretold.speed_up - 1
    if abs(gap) <= GAP:
        return ""
    rest = record.step_seconds - foretold.step - foretold.asking
    parts = {"plain": foretold.plain, "verifying": foretold.verifying, "drafting": foretold.drafting}
    parts |= {"asking": foretold.asking, "rest": rest}
    told = " + ".join(f"{name} {MS * seconds:.2f}" for name, seconds in parts.items())
    step = f"a step took {MS * record.step_seconds:.2f} ms = {told}"
    return f", gap {100 * gap:+.0f} %: {step}; with asking {figure(foretold.speed_up_with_asking)} x"


def same_tokens_line(records: Records, pair: str) -> Result:
    """Requests whose tokens differ from those of the arm without drafts."""
    num_differing = num_compared = 0
    for (streams, name), record in records.items():
        if name == NONE.name:
            continue
        for run, plain in zip(record.runs, records[streams, NONE.name].runs, strict=True):
            num_compared += len(run.fingerprints)
            num_differing += sum(a != b for a, b in zip(run.fingerprints, plain.fingerprints, strict=True))
    return Result(f"{pair}: requests with other tokens than without drafts", num_differing, at_most=0,
                note=f"of {num_compared}")  # fmt: skip


def cost_lines(pair: str, target: Costs, draft: Costs) -> list[Result]:
    """The steps of the models alone."""
    verifying = {n: seconds for n, seconds in target.items() if n != PLAIN}
    return [
        Result(f"{pair}: target's step alone", MS * target[PLAIN], "ms"),
        *(Result(f"{pair}: target verifies {n}", MS * seconds, "ms") for n, seconds in verifying.items()),
        *(Result(f"{pair}: draft guesses {n}", MS * seconds, "ms") for n, seconds in draft.items()),
    ]


# -- tokens per second of all arms by number of streams


def rows_of(records: Records) -> list[list[str]]:
    """The header, and a row per number of streams."""
    counts, names = _streams_and_arms(records)
    header = ["streams", *names, "adaptive / best other", "adaptive / none", "acceptance", "draft length"]
    return [header, *(_row(records, streams, names) for streams in counts)]


def _streams_and_arms(records: Records) -> tuple[list[int], list[str]]:
    names = dict.fromkeys(name for _, name in records if name != ASKED.name)
    return sorted({streams for streams, _ in records}), list(names)


def plot(records: Records, title: str, path: Path) -> None:
    """Speeds relative to no speculation, by number of streams.  Needs matplotlib."""
    from matplotlib.figure import Figure

    counts, names = _streams_and_arms(records)
    drawing = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawing.add_subplot()
    for name in names:
        ratios = [records[streams, name].speed / records[streams, NONE.name].speed for streams in counts]
        axes.plot(counts, ratios, marker="o", linewidth=2.5 if name == ADAPTIVE.name else 1.2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="concurrent streams", ylabel="tokens/s, of no speculation's", title=title)
    axes.legend()
    drawing.savefig(path, dpi=150)


def _row(records: Records, streams: int, names: list[str]) -> list[str]:
    own, worth = records[streams, ADAPTIVE.name], adaptive_worth(records, streams)[0]
    acceptance = own.acceptance
    return [
        str(streams),
        *(_cell(records[streams, name]) for name in names),
        f"{worth:.2f}",
        f"{own.speed / records[streams, NONE.name].speed:.2f}",
        "-" if acceptance is None else f"{acceptance:.2f}",
        f"{own.draft_length:.1f}",
    ]


def _cell(record: ModeRecord) -> str:
    return f"{'~' if record.is_noisy else ''}{figure(record.speed)} ({100 * record.spread:.0f} %)"
