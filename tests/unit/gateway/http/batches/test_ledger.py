"""What is done of a batch, read again after a death at any byte."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest
from msgspec import Raw

from services.gateway.http.batches.ledger import Ledger
from services.gateway.http.batches.objects import ResultError, ResultResponse

BATCH = "batch_" + "0a" * 16
NUM_LINES = 12


def opened(folder: Path, num_lines: int = NUM_LINES) -> Ledger:
    return Ledger(folder / "output", folder / "errors", BATCH, num_lines)


def note(ledger: Ledger, index: int, status: int = 200) -> None:
    ledger.answered(index, f"id-{index}", ResultResponse(status_code=status, request_id="r", body=Raw(b'{"x": 1}')))


def custom_ids(path: Path) -> list[str]:
    return [json.loads(text)["custom_id"] for text in path.read_text().splitlines()]


def test_answers_and_errors_go_to_their_files(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    note(ledger, 3)
    note(ledger, 5, 400)
    ledger.given_up(7, "id-7", ResultError(code="batch_expired", message="late"))
    assert (ledger.num_completed, ledger.num_failed) == (1, 2)
    assert list(ledger.unfinished()) == [0, 1, 2, 4, 6, 8, 9, 10, 11]
    ledger.close()
    (answer,) = map(json.loads, (tmp_path / "output").read_text().splitlines())
    assert answer["response"] == {"status_code": 200, "request_id": "r", "body": {"x": 1}} and answer["error"] is None
    failed, expired = map(json.loads, (tmp_path / "errors").read_text().splitlines())
    assert failed["response"]["status_code"] == 400 and expired["response"] is None
    assert expired["error"]["code"] == "batch_expired"
    assert len({answer["id"], failed["id"], expired["id"]}) == 3


def test_a_line_is_noted_once(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for status in (200, 200, 400):
        note(ledger, 3, status)
    ledger.given_up(3, "id-3", ResultError(code="batch_cancelled", message=""))
    ledger.close()
    assert custom_ids(tmp_path / "output") == ["id-3"] and not custom_ids(tmp_path / "errors")


def test_a_closed_one_takes_nothing(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.close()
    with pytest.raises(OSError, match="closed"):
        note(ledger, 1)
    assert not custom_ids(tmp_path / "output")


def test_a_death_at_any_byte_costs_no_line_and_doubles_none(tmp_path: Path) -> None:
    """Cut after every number of bytes, and go on: in the end each line is there once."""
    whole = opened(tmp_path / "whole")
    for index in range(NUM_LINES):
        note(whole, index, 200 if index % 3 else 400)
    whole.close()
    output, errors = ((tmp_path / "whole" / name).read_bytes() for name in ("output", "errors"))
    rng = random.Random(5)
    for length in range(0, len(output) + 1, 7):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / "output").write_bytes(output[:length])
        (folder / "errors").write_bytes(errors[: rng.randint(0, len(errors))])
        ledger = opened(folder)
        missing = list(ledger.unfinished())
        assert NUM_LINES - len(missing) == ledger.num_completed + ledger.num_failed
        assert (folder / "output").read_bytes() == output[:length][: output[:length].rfind(b"\n") + 1]
        for index in missing:
            note(ledger, index, 200 if index % 3 else 400)
        ledger.close()
        found = custom_ids(folder / "output") + custom_ids(folder / "errors")
        assert sorted(found) == sorted(f"id-{index}" for index in range(NUM_LINES))


@pytest.mark.parametrize("junk", [b"\0\0\0\n", b'{"id": "batch_req_other00000001"}\n', b'{"id": 7}\n'])
def test_what_is_no_result_is_cut_off_with_all_behind_it(tmp_path: Path, junk: bytes) -> None:
    ledger = opened(tmp_path)
    note(ledger, 0)
    ledger.close()
    good = (tmp_path / "output").read_bytes()
    (tmp_path / "output").write_bytes(good + junk + good.replace(b"00000000", b"00000001"))
    ledger = opened(tmp_path)
    assert (tmp_path / "output").read_bytes() == good and list(ledger.unfinished()) == list(range(1, NUM_LINES))
    ledger.close()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    ledger, write = opened(tmp_path), os.write
    note(ledger, 0)
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    with pytest.raises(OSError, match="no room"):
        note(ledger, 1)
    monkeypatch.undo()
    assert not ledger.is_done(1)
    note(ledger, 1)
    ledger.close()
    assert custom_ids(tmp_path / "output") == ["id-0", "id-1"]


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    ledger = opened(tmp_path, 400)

    def note_all(first: int) -> None:
        for index in range(first, 400):
            note(ledger, index)

    threads = [threading.Thread(target=note_all, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()
    assert sorted(custom_ids(tmp_path / "output")) == sorted(f"id-{index}" for index in range(400))
