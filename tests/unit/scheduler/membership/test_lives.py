"""Numbers of lives grow without a clock, with the file that counts them, without it, and with one that is spoilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.scheduler.membership.lives import Lives
from shared.clocks.epochs import LIMIT, MAX_LEAP, SPAN, is_late, is_possible, life_of


def test_each_life_is_greater_with_all_its_links(tmp_path: Path) -> None:
    file, before = tmp_path / "epoch", 0
    for _ in range(5):
        lives = Lives(file)
        assert lives.epoch > before
        links = [lives.next_link() for _ in range(100)]
        assert links == sorted(set(links)) and lives.epoch < links[0]
        assert {life_of(link) for link in links} == {life_of(lives.epoch)}
        before = links[-1]
    assert [one.name for one in tmp_path.iterdir()] == ["epoch"]


@pytest.mark.parametrize(
    "content", [b"", b"no number", b"\xff\xfe", b"-7", b"9" * 5000, str(LIMIT - SPAN).encode(), b"0"]
)
def test_a_spoilt_file_is_as_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "epoch"
    file.write_bytes(content)
    assert life_of(Lives(file).epoch) == 1
    assert life_of(Lives(file).epoch) == 2, "and is written anew"


def test_a_file_that_cannot_be_read_or_written_costs_only_the_memory(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "epoch"
    assert life_of(Lives(missing).epoch) == 1
    (directory := tmp_path / "directory").mkdir()
    lives = Lives(directory)
    assert life_of(lives.epoch) == 1 and lives.pass_by(7 * SPAN + 3) and life_of(lives.epoch) == 8


def test_two_lives_without_a_file_differ() -> None:
    assert len({Lives().epoch for _ in range(50)}) == 50


def test_a_life_passes_by_what_members_know(tmp_path: Path) -> None:
    file = tmp_path / "epoch"
    lives = Lives(file)
    first = lives.epoch
    assert not lives.pass_by(0) and not lives.pass_by(first) and not lives.pass_by(lives.next_link())
    for known in (first + SPAN // 2, 40 * SPAN, lives.epoch + MAX_LEAP // 2):
        before = lives.epoch
        assert lives.pass_by(known) and lives.epoch > known and lives.former[-1] == before
        assert lives.next_link() > known
    assert life_of(Lives(file).epoch) == life_of(lives.epoch) + 1, "the next life is beyond that too"


def test_the_last_eight_numbers_of_a_life_are_known() -> None:
    lives, numbers = Lives(), []
    for _ in range(20):
        numbers.append(lives.epoch)
        assert lives.pass_by(lives.last + SPAN)
    assert lives.former == numbers[-8:]


def test_what_nobody_can_know_is_passed_by_by_nobody() -> None:
    lives = Lives()
    before = lives.epoch
    for known in (lives.last + MAX_LEAP + 1, LIMIT, LIMIT + 1, 2**63, 2**64 - 1, -1):
        assert not lives.pass_by(known), known
    assert (lives.epoch, lives.former) == (before, [])


def test_the_last_life_has_possible_numbers(tmp_path: Path) -> None:
    file = tmp_path / "epoch"
    file.write_bytes(str(LIMIT - 3 * SPAN).encode())
    lives = Lives(file)
    assert not lives.pass_by(LIMIT - SPAN) and lives.pass_by(LIMIT - SPAN - 1)
    assert is_possible(lives.epoch) and is_possible(lives.next_link())


def test_links_are_ordered_within_a_life_alone() -> None:
    assert is_late(5, 6) and not is_late(6, 6) and not is_late(7, 6)
    assert not is_late(5, SPAN + 6), "of another life: whether that is the one followed, rosters say"
