"""From records to what is claimed: never worse than the best of the other arms, and worth it for a lone stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median

from scripts.bench.common.report import Result, figure
from scripts.bench.speculation.arms import ADAPTIVE, EAGLE, MODEL, NONE
from scripts.bench.speculation.contest import ModeRecord, Records

NEVER_WORSE = 0.97  # of the better of no speculation and the best fixed number
WORTH = 1.0  # of no speculation, at batch 1, where a fixed number of draft tokens is worth it
MADE_WORTH = 1.8  # the same, of the made pair
HEAD_WORTH = 1.6  # of no speculation, at batch 1: a draft head at its best
HEAD_LENGTH = 1.4  # tokens of a step, of those with the draft model's drafts
LEGEND = (
    "tokens/s, medians (spread of the rounds); ~: others took more than 0.15 cores in some round; adaptive / best "
    "other: by medians of speeds relative to their round's mean; acceptance, draft length: the adaptive arm's"
)


def of_kind(records: Records, kind: str) -> Records:
    """The arms of one kind, by their names, and the one without drafts."""
    named = {(streams, title.removeprefix(f"{kind} ")): record for (streams, title), record in records.items()}
    return {key: named[key] for key in named if " " not in key[1]}


def adaptive_worth(records: Records, num_streams: int) -> tuple[float, str]:
    """The adaptive arm's speed of that of the best other, and which that is.

    In each round, whose turns are near enough in time to be alike, the arm is held against the one that was the best of
    all *other* rounds; the median of the rounds.  The best of the same rounds would be the luckiest of several arms
    that differ by less than chance does, and not even that arm itself would reach its figure again.
    """
    arms = {name: r.runs for (streams, name), r in records.items() if streams == num_streams}
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


def lone_lines(records: Records, pair: str, at_least: float | None = None) -> list[Result]:
    """What drafts were worth at batch 1: a line for each fixed number of draft tokens, and one for the adaptive arm.

    The adaptive arm is to be `at_least` so much, or above 1 where a fixed number is.
    """
    speeds = {name: record.speed for (streams, name), record in records.items() if streams == 1}
    plain, own = speeds.pop(NONE.name), speeds.pop(ADAPTIVE.name)
    lines = [Result(f"{pair}, 1 stream: {name} / none", speed / plain, "x") for name, speed in speeds.items()]
    wanted = at_least or (WORTH if max(speeds.values(), default=plain) > plain else None)
    return [*lines, Result(f"{pair}, 1 stream: adaptive / none", own / plain, "x", at_least=wanted)]


def head_lines(records: Records, pair: str) -> list[Result]:
    """What a head is worth at batch 1 and how many of its drafts are taken, beside the draft model."""
    lone = {title: record for (streams, title), record in records.items() if streams == 1}
    heads = {name: record for name, record in lone.items() if name.startswith(f"{EAGLE} ")}
    if not heads:
        return []
    best = max(heads, key=lambda name: heads[name].speed)
    worth = heads[best].speed / lone[NONE.name].speed
    lines = [Result(f"{pair}, 1 stream: {best} / none", worth, "x", at_least=HEAD_WORTH)]
    for name, record in heads.items():
        other = lone.get(name.replace(EAGLE, MODEL, 1))
        if "=" in name and other is not None and record.step_tokens and other.step_tokens:
            note = f"{figure(record.step_tokens)} against {figure(other.step_tokens)} tokens of a verified step"
            ratio = record.step_tokens / other.step_tokens
            lines.append(Result(f"{pair}, 1 stream: {name} / draft model", ratio, "x", at_least=HEAD_LENGTH, note=note))
    return lines


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


# -- tokens per second of all arms by number of streams


def rows_of(records: Records) -> list[list[str]]:
    """The header, and a row per number of streams."""
    counts, names = sorted({streams for streams, _ in records}), list(dict.fromkeys(name for _, name in records))
    header = ["streams", *names, "adaptive / best other", "adaptive / none", "acceptance", "draft length"]
    return [header, *(_row(records, streams, names) for streams in counts)]


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
