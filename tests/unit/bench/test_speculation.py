"""scripts/bench_speculation and prove_speculation: who is asked what, and what is made of what was measured."""

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
from scripts.bench.speculation.arms import ADAPTIVE, ASKED, NONE, Pair, bundled, fixed
from scripts.bench.speculation.contest import ModeRecord, ModeRun, Records
from scripts.bench.speculation.figures import foretell, lone_lines, never_worse_lines, same_tokens_line
from scripts.bench.speculation.prove import MIXTURE, SMALL, Prompts, Variant, compared
from shared.config import load_settings

TARGET, DRAFT = {0: 0.010, 2: 0.011, 4: 0.012}, {2: 0.002, 4: 0.004}


def counts(num_steps: int = 100, num_drafts: int = 0, length: int = 0, accepted: int = 0) -> Counter[str]:
    drafted = num_drafts * length
    return Counter(num_steps=num_steps, num_drafts=num_drafts, num_draft_tokens=drafted, num_accepted_tokens=accepted)


def run(speed: float, what: Counter[str] | None = None, fingerprints: tuple[int, ...] = (1, 2)) -> ModeRun:
    return ModeRun(100 / speed, 100, what or counts(), 0.0, fingerprints)


def records(none: float, four: float, adaptive: float, streams: int = 1) -> Records:
    """A plain step takes 10 ms where `none` is 100; each draft of four has three accepted."""
    drafted = counts(num_steps=25, num_drafts=25, length=4, accepted=75)
    runs = {NONE.name: run(none), "k=4": run(four, drafted), ADAPTIVE.name: run(adaptive, drafted)}
    if streams == 1:
        runs[ASKED.name] = run(none / 2)
    return {(streams, name): ModeRecord([one]) for name, one in runs.items()}


def test_arms_differ_only_in_their_drafts() -> None:
    pair = bundled()
    plain, four, adaptive = (load_settings(arm.settings(pair), environ={}) for arm in (NONE, fixed(4), ADAPTIVE))
    none, fixed_, free = plain.speculation, four.speculation, adaptive.speculation
    assert (none.draft, fixed_.num_draft_tokens, free.num_draft_tokens) == ("off", 4, 0)
    assert fixed_.draft == free.draft == str(pair.draft) and pair.draft.is_dir()
    mute = load_settings(ASKED.settings(pair), environ={}).speculation
    assert (mute.draft, mute.num_draft_tokens) == ("ngram", 4) and mute.prompt_lookup_min > 1024
    assert plain.engine.model == four.engine.model == adaptive.engine.model == str(pair.target)


def test_every_arm_is_asked_the_same_and_every_round_something_else() -> None:
    pair = bundled()
    first, again, other = (pair.slots(seed, 3, 4, 50) for seed in ("1-0", "1-0", "1-1"))
    assert first == again != other
    assert [len(slot) for slot in first] == [4, 4, 4]
    assert all(r.sampling.max_tokens == 50 and r.sampling.ignore_eos for slot in first for r in slot)
    assert len({request.text for slot in other for request in slot}) > 8


def test_a_record_tells_medians_and_what_became_of_drafts() -> None:
    record = ModeRecord([run(speed, counts(10, 10, 4, 30)) for speed in (90, 100, 120)])
    assert record.speed == pytest.approx(100) and record.spread == pytest.approx(1 / 3)
    assert record.acceptance == 0.75 and record.tokens_per_draft == 4 and record.draft_length == 4
    plain = ModeRecord([run(100)])
    assert plain.acceptance is None and plain.tokens_per_draft == 1 and plain.draft_length == 0


def test_the_foretold_speed_up_is_tokens_over_time() -> None:
    found = records(100, 200, 200)
    foretold = foretell(found, 4, TARGET, DRAFT)
    assert foretold.step == pytest.approx(0.010 + 0.002 + 0.004)
    assert foretold.speed_up == pytest.approx(4 * 0.010 / 0.016)
    assert foretold.speed_up_with_asking == pytest.approx(4 * 0.010 / 0.026), "asking takes a plain step's time here"


def test_a_gap_to_the_foretold_is_explained_by_a_step_s_parts() -> None:
    near, *_ = lone_lines(records(100, 240, 240), "p", [4], TARGET, DRAFT)
    assert near.measured == pytest.approx(2.4) and "gap" not in near.note and "2.50" in near.note
    far, own = lone_lines(records(100, 150, 150), "p", [4], TARGET, DRAFT)
    assert "gap -40 %" in far.note and "verifying 2.00" in far.note and "drafting 4.00" in far.note
    assert "asking 10.00" in far.note and "rest 0.67" in far.note, "100 tokens in 667 ms and 25 steps, less 26"
    assert "with asking 1.54 x" in far.note
    assert own.at_least == 1.0 and not own.missed and "gap -40 %" in own.note


def test_drafts_that_cannot_pay_are_not_asked_to() -> None:
    costly = {4: 0.2}
    *_, own = lone_lines(records(100, 40, 99), "p", [4], TARGET, costly)
    assert own.at_least is None and "not worth their cost" in own.note
    *_, own = lone_lines(records(100, 40, 99), "p", [4], TARGET, costly, at_least=1.8)
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


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = records(100, 150, 140) | records(100, 50, 98, streams=8)
    figures.plot(found, "title", tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_are_asked_alike_and_sampled_by_their_number() -> None:
    prompts = Prompts([[1, 2], [3]] * 8, 5)
    assert prompts.requests("T=0.7") == prompts.requests("T=0.7")
    assert [r.sampling.seed for r in prompts.requests("T=1.0")] == list(range(16))
    mixed = prompts.requests("mixed")
    assert mixed[2].sampling.logprobs == MIXTURE[2]["logprobs"] and mixed[7].sampling.stop == ["."]
    assert list(mixed[1].token_ids.ids) == [3]


def test_a_comparison_fails_on_one_other_token_and_on_what_did_not_happen() -> None:
    accepted = counts(num_drafts=2, length=4, accepted=4)
    good = compared("p, v, T=0", 0, "99 tokens", accepted, [])
    assert not good.missed and "0.500 accepted" in good.note
    assert compared("p, v, T=0", 1, "99 tokens", accepted, []).missed
    bad = compared("p, v, T=0", 0, "99 tokens", accepted, ["no preemption"])
    assert bad.missed and bad.note.startswith("no preemption")


def test_what_is_missing_is_named() -> None:
    accepted = counts(num_drafts=5, length=4, accepted=3)
    assert Variant("v", {}).missing(accepted) == []
    assert Variant("v", {}).missing(counts()) == ["no draft accepted"]
    assert Variant("v", {}, expects_drafts=False).missing(counts()) == []
    assert Variant(SMALL, {}).missing(accepted) == ["no preemption"]


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
    pair = Pair("p", Path("t"), Path("d"), lambda rng, n: None, {"max_model_len": 64})
    assert all(arm.settings(pair)["max_model_len"] == 64 for arm in (NONE, fixed(2), ADAPTIVE))
