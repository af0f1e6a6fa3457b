"""scripts/bench_speculation: the requests that each server gets, and the figures made of the measurements."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import pytest

from scripts.bench.common.deployment import generate
from scripts.bench.speculation import figures
from scripts.bench.speculation.arms import ADAPTIVE, EAGLE, MODEL, NONE, Pair, arms_of, bundled, fixed
from scripts.bench.speculation.contest import ModeRecord, ModeRun, Records
from scripts.bench.speculation.figures import head_lines, lone_lines, never_worse_lines, of_kind, same_tokens_line
from scripts.bench.speculation.plot import draw
from shared.config import load_settings


def counts(num_drafts: int = 0, length: int = 0, accepted: int = 0) -> Counter[str]:
    return Counter(num_drafts=num_drafts, num_draft_tokens=num_drafts * length, num_accepted_tokens=accepted)


def run(speed: float, what: Counter[str] | None = None, fingerprints: tuple[int, ...] = (1, 2)) -> ModeRun:
    return ModeRun(100 / speed, 100, what or counts(), 0.0, fingerprints)


def records(none: float, four: float, adaptive: float, streams: int = 1) -> Records:
    """Each draft of four has three accepted."""
    drafted = counts(num_drafts=25, length=4, accepted=75)
    runs = {NONE.name: run(none), "k=4": run(four, drafted), ADAPTIVE.name: run(adaptive, drafted)}
    return {(streams, name): ModeRecord([one]) for name, one in runs.items()}


def test_arms_differ_only_in_their_drafts() -> None:
    pair = bundled()
    plain, four, adaptive = (load_settings(arm.settings(pair), environ={}) for arm in (NONE, fixed(4), ADAPTIVE))
    none, fixed_, free = plain.speculation, four.speculation, adaptive.speculation
    assert (none.draft, fixed_.num_draft_tokens, free.num_draft_tokens) == ("off", 4, 0)
    assert fixed_.draft == free.draft == pair.drafts[MODEL] and Path(pair.drafts[MODEL]).is_dir()
    assert plain.engine.model == four.engine.model == adaptive.engine.model == str(pair.target)


def test_every_arm_is_asked_the_same_and_every_round_something_else() -> None:
    pair = bundled()
    first, again, other = (pair.slots(seed, 3, 4, 50) for seed in ("1-0", "1-0", "1-1"))
    assert first == again != other
    assert [len(slot) for slot in first] == [4, 4, 4]
    assert all(r.sampling.max_tokens == 50 and r.sampling.ignore_eos for slot in first for r in slot)
    assert len({request.text for slot in other for request in slot}) > 8


def test_kinds_of_drafts_are_held_against_each_other() -> None:
    arms = arms_of((MODEL, EAGLE), [4])
    assert [arm.title for arm in arms] == ["none", "model k=4", "model adaptive", "eagle k=4", "eagle adaptive"]
    assert str(arms[3].settings(bundled())["draft"]).startswith("eagle:")
    found = records(100, 150, 140) | records(100, 170, 160, streams=2)
    titled = {
        (streams, name if name == NONE.name else f"{MODEL} {name}"): one for (streams, name), one in found.items()
    }
    titled |= {(1, "eagle k=4"): ModeRecord([run(180, counts(25, 4, 90))])}
    assert of_kind(titled, MODEL) == found
    worth, length = head_lines(titled, "p")
    assert worth.measured == pytest.approx(1.8) and not worth.missed
    assert length.measured == pytest.approx((1 + 90 / 25) / (1 + 75 / 25)) and length.missed
    del titled[1, "eagle k=4"]
    assert head_lines(titled, "p") == []
    picture = draw(titled, "a title")
    assert picture.count("<rect") == 1 + 2 * 3 and ">1.70<" in picture and "model adaptive" in picture


def test_a_record_tells_medians_and_what_became_of_drafts() -> None:
    record = ModeRecord([run(speed, counts(10, 4, 30)) for speed in (90, 100, 120)])
    assert record.speed == pytest.approx(100) and record.spread == pytest.approx(1 / 3)
    assert record.acceptance == 0.75 and record.draft_length == 4
    plain = ModeRecord([run(100)])
    assert plain.acceptance is None and plain.draft_length == 0


def test_a_lone_stream_s_drafts_are_worth_it_where_a_fixed_number_is() -> None:
    four, own = lone_lines(records(100, 150, 98), "p")
    assert four.measured == pytest.approx(1.5) and not four.target
    assert own.missed and own.at_least == 1.0
    *_, own = lone_lines(records(100, 40, 99), "p")
    assert own.at_least is None, "where no number of drafts pays, none is asked for"
    *_, own = lone_lines(records(100, 40, 99), "p", at_least=1.8)
    assert own.missed


def test_adaptive_is_held_against_the_best_of_the_others() -> None:
    found = records(100, 150, 140) | records(100, 50, 98, streams=8)
    one, eight = never_worse_lines(found, "p")
    assert one.measured == pytest.approx(140 / 150) and one.missed and "k=4" in one.note
    assert eight.measured == pytest.approx(0.98) and not eight.missed and "none" in eight.note


def test_the_machine_s_drift_from_round_to_round_is_nobody_s() -> None:
    found = records(100, 150, 147)
    for pace in (0.3, 0.5, 2.0):
        for name, record in found.items():
            slow = pace * (0.9 if name[1] == "adaptive" and pace == 0.3 else 1.0)  # one round of chance
            record.runs.append(run(slow * record.runs[0].speed))
    (line,) = never_worse_lines(found, "p")
    assert line.measured == pytest.approx(147 / 150)


def test_the_best_of_several_equal_arms_is_not_the_luckiest() -> None:
    """Arms that are all the same, in rounds of much chance: none is worse than another."""
    chance = Random(1)
    worths = []
    for _ in range(200):
        found = {
            (8, name): ModeRecord([run(100 * chance.gauss(1, 0.1)) for _ in range(9)])
            for name in (NONE.name, "k=2", "k=4", "k=8", ADAPTIVE.name)
        }
        worths.append(never_worse_lines(found, "p")[0].measured or 0.0)
    assert mean(worths) == pytest.approx(1.0, abs=0.01)


def test_other_tokens_are_counted() -> None:
    found = records(100, 150, 140)
    assert same_tokens_line(found, "p").measured == 0 and not same_tokens_line(found, "p").missed
    found[1, "k=4"].runs[0] = run(150, fingerprints=(1, 3))
    assert same_tokens_line(found, "p").missed and same_tokens_line(found, "p").measured == 1


def test_tables_name_every_arm_and_number_of_streams() -> None:
    found = records(100, 150, 140) | records(100, 50, 98, streams=8)
    header, first, second = figures.rows_of(found)
    assert header[:4] == ["streams", "none", "k=4", "adaptive"]
    assert first[0] == "1" and second[0] == "8" and "0.93" in first and "0.98" in second


class Mute:
    """A gateway whose stream ends without a word."""

    def Generate(self, request: Any, timeout: float) -> Any:
        async def nothing() -> Any:
            return
            yield

        return nothing()


def test_a_stream_without_its_last_message_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="last message"):
        asyncio.run(generate(Mute(), None))


def test_a_pair_s_settings_hold_for_every_arm() -> None:
    pair = Pair("p", Path("t"), {MODEL: "d"}, lambda rng, n: None, {"max_model_len": 64})
    assert all(arm.settings(pair)["max_model_len"] == 64 for arm in (NONE, fixed(2), ADAPTIVE))
