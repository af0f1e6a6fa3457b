"""The scheduler's next life has a smaller number than the last, as after a directory was lost or a clock set back: its
members agree with it on a greater one, and streams go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.scheduler.membership.lives import FILE
from shared.clocks.epochs import SPAN, life_of
from tests.system.harness import ask, troupe

OPTIONS = ("--num-threads", "1", "--num-blocks", "512", "--drain-timeout", "1")
COUNTED = 400  # lives, before this test's first


def test_a_scheduler_whose_count_was_lost_is_believed_and_its_streams_go_on(tmp_path: Path) -> None:
    file = tmp_path / "run" / FILE
    file.parent.mkdir(mode=0o700)
    file.write_text(f"{COUNTED * SPAN}\n", encoding="ascii")
    asked = [ask("One day", seed=seed, max_tokens=250, ignore_eos=True, temperature=0.8) for seed in range(3)]
    with troupe(tmp_path, *OPTIONS) as running:
        wanted = running.generate(asked)
        assert life_of(int(file.read_text())) == COUNTED + 1
        file.unlink()
        answers = asyncio.run(running.disturb(asked, "scheduler"))
        for answer, other in zip(answers, wanted, strict=True):
            assert not isinstance(answer, BaseException), answer
            assert [one.token_ids for one in answer] == [one.token_ids for one in other]
        raised = [line for line in running.logs() if line["event"] == "epoch_raised"]
        assert raised and life_of(raised[-1]["epoch_before"]) == 1 and life_of(raised[-1]["epoch"]) == COUNTED + 2
        assert life_of(int(file.read_text())) == COUNTED + 2
