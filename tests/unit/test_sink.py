"""Lines into descriptors that are full, broken, or not read: none raises, none waits, and what is missing is told."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.processes.background import BackgroundQueue
from shared.processes.losses import LOG, count_loss, losses
from shared.processes.sink import Sink, chunked

ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")
PATIENCE = 20.0  # seconds


def notice(count: int) -> bytes:
    return f"missing {count}\n".encode()


def sink_to(file: int, **bounds: int) -> Sink:
    return Sink(file, LOG, notice, **bounds)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Reader(threading.Thread):
    """Reads a pipe to its end."""

    def __init__(self, file: int) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self._file = file
        self.start()

    def run(self) -> None:
        with os.fdopen(self._file, "rb") as pipe:
            self.text = pipe.read().decode()


def accounted(text: str) -> int:
    """Lines that are there, and those that are said to be missing."""
    missing = sum(map(int, re.findall(r"^missing (\d+)$", text, re.MULTILINE)))
    return missing + len(re.findall(r"^line \d+$", text, re.MULTILINE))


def test_lines_of_many_threads_arrive_whole_and_each_thread_s_in_order(tmp_path: Path) -> None:
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    sink = sink_to(file)

    def write(number: int) -> None:
        for index in range(1000):
            sink.write(f"{number} {index}\n".encode())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sink.drain(PATIENCE)
    pairs = [tuple(map(int, line.split())) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(pairs) == 4000
    assert all([i for n, i in pairs if n == thread] == list(range(1000)) for thread in range(4))
    os.close(file)


def test_a_reader_that_does_not_read_stops_nobody_and_is_told_what_it_missed() -> None:
    reader, writer = os.pipe()
    sink = sink_to(writer, max_lines=100_000, max_bytes=100_000)
    before = losses()[LOG]
    for index in range(50_000):  # far beyond the pipe and the queue
        sink.write(f"line {index}\n".encode())
    assert not sink.drain(0.05)
    assert losses()[LOG] - before > 10_000
    said = Reader(reader)
    assert sink.drain(PATIENCE), "the gap is told when it can be, without another line"
    sink.write(b"line 50000\n")
    assert sink.drain(PATIENCE)
    os.close(writer)
    said.join()
    numbers = [int(number) for number in re.findall(r"^line (\d+)$", said.text, re.MULTILINE)]
    assert numbers == sorted(numbers)
    assert accounted(said.text) == 50_001
    # A second gap where the sink's thread had no core until the queue was full, and then filled the pipe.
    assert said.text.endswith("line 50000\n") and 1 <= said.text.count("missing") <= 2


def test_a_reader_that_has_left_costs_lines_and_the_next_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    first = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    sink = sink_to(writer)
    sink.write(b"line 0\n")
    assert sink.drain(PATIENCE)
    os.close(first)
    for index in range(1, 21):
        sink.write(f"line {index}\n".encode())
    assert sink.drain(PATIENCE)
    second = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.read(second, 100)  # a fifo keeps what was in it
    sink.write(b"line 21\n")
    assert sink.drain(PATIENCE)
    assert os.read(second, 1000) == b"missing 20\nline 21\n"
    os.close(second)
    os.close(writer)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_and_a_closed_descriptor_cost_lines_only() -> None:
    full = os.open(FULL, os.O_WRONLY)
    closed = os.dup(full)
    os.close(closed)
    for file in (full, closed):
        before, sink = losses()[LOG], sink_to(file)
        for _ in range(100):
            sink.write(b"line 0\n")
        assert sink.drain(PATIENCE)
        assert losses()[LOG] - before == 100
    os.close(full)


def test_a_line_that_was_cut_is_counted_and_the_next_begins_a_line_of_its_own(tmp_path: Path) -> None:
    """A limit on the file's size stands for a full disk or a quota: the first part of a write is there."""
    path, limits = tmp_path / "log", resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sink = sink_to(file)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        for index in range(30):
            sink.write(f"line {index}\n".encode())
        assert sink.drain(PATIENCE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.stat().st_size == 100
    sink.write(b"line 30\n")
    assert sink.drain(PATIENCE)
    text = path.read_text()
    cut = [line for line in text.splitlines() if not re.fullmatch(r"line \d+|missing \d+", line)]
    assert len(cut) <= 1 and all("line 13".startswith(line) for line in cut)
    assert accounted(text) - (len(re.findall("^line 1$", text, re.MULTILINE)) - 1) == 31
    assert text.endswith("\nline 30\n")
    os.close(file)


def test_a_descriptor_that_others_made_non_blocking_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    sink = sink_to(writer)
    for index in range(20_000):
        sink.write(f"line {index}\n".encode())
    said = Reader(reader)
    assert sink.drain(PATIENCE)
    os.close(writer)
    said.join()
    assert accounted(said.text) == 20_000


def test_what_is_written_at_once_fits_a_pipe() -> None:
    lines = [b"a" * 1500] * 10 + [b"b" * 9000]
    chunks = list(chunked(lines, 4096))
    assert [line for chunk in chunks for line in chunk] == lines
    assert all(len(b"".join(chunk)) <= 4096 for chunk in chunks[:-1]) and chunks[-1] == [lines[-1]]


def test_a_defect_in_delivery_does_not_end_it() -> None:
    got: list[int] = []

    def deliver(items: list[int]) -> None:
        if 0 in items:
            raise ZeroDivisionError
        got.extend(items)

    queue = BackgroundQueue("test", deliver, max_items=10, max_bytes=10, on_gap=lambda _: [])
    assert queue.put(0, 1) and queue.drain(PATIENCE)
    assert queue.put(1, 100) and queue.drain(PATIENCE), "one that is too large is taken alone"
    assert got == [1]


def test_losses_are_counted_by_kind() -> None:
    before = losses()
    count_loss(LOG, 3)
    assert losses() == {**before, LOG: before[LOG] + 3}


PROGRAM = """
import logging, os, sys, threading, warnings
from shared.processes.logging import setup_logging
from shared.processes.standard_streams import guard_standard_streams
import structlog
guard_standard_streams()
setup_logging("worker", "worker-1", format="json")
log = structlog.get_logger()
os.set_inheritable(3, False)
def step():
    for index in range({count}):
        log.info("step", index=index, half="\\ud800", large=2**70)
thread = threading.Thread(target=step)
thread.start()
step()
thread.join()
print("to standard output")
print("half a pair \\ud800", file=sys.stderr)
warnings.warn("of the test")
logging.getLogger("library").error("last resort")
os.write(3, b"alive")
log.error("fatal", error="of the test")
sys.exit({status})
"""


def run(count: int, status: int, stderr: int, *, stdout: int = subprocess.DEVNULL) -> tuple[int, bytes]:
    """How the program ends, and whether it came to its own end."""
    program = PROGRAM.format(count=count, status=status)
    alive, end = os.pipe()
    command = f'exec "$0" "$@" 3>&{end}'
    process = subprocess.Popen(
        ["bash", "-c", command, sys.executable, "-c", program],
        cwd=ROOT, stdout=stdout, stderr=stderr, pass_fds=[end],
    )  # fmt: skip
    os.close(end)
    result = process.wait(PATIENCE)
    said = os.read(alive, 100)
    os.close(alive)
    return result, said


def test_a_process_ends_as_it_wants_to_whatever_becomes_of_its_lines(tmp_path: Path) -> None:
    """Not by an exception in a handler, and not with status 120 because of what it could not flush."""
    dead, writer = os.pipe()
    os.close(dead)
    assert run(300, 7, writer, stdout=writer) == (7, b"alive"), "the reader has left"
    os.close(writer)
    if FULL.exists():
        full = os.open(FULL, os.O_WRONLY)
        assert run(300, 7, full, stdout=full) == (7, b"alive"), "the disk is full"
        os.close(full)
    reader, writer = os.pipe()
    assert run(3000, 7, writer, stdout=writer) == (7, b"alive"), "the reader does not read"
    os.close(writer)
    os.close(reader)


def test_a_reader_that_reads_gets_everything_to_the_last_line(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert run(3000, 7, log.fileno(), stdout=log.fileno()) == (7, b"alive")
    lines = (tmp_path / "log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert len([event for event in events if event["event"] == "step"]) == 6000
    assert events[-1]["event"] == "fatal"
    for words in ("to standard output", "half a pair", "of the test", "last resort"):
        assert any(words in line for line in lines), words


def test_a_process_without_standard_streams_writes_into_no_other_file(tmp_path: Path) -> None:
    """The number of a closed stream is soon that of another file."""
    program = (
        f"import os, sys; file = os.open({str(tmp_path / 'other')!r}, os.O_WRONLY | os.O_CREAT)\n"
        "assert file == 2\n"
        "from shared.processes.standard_streams import guard_standard_streams\n"
        "guard_standard_streams(); print('a line', file=sys.stderr); print('a line')"
    )
    done = subprocess.run(["bash", "-c", 'exec "$0" "$@" 2>&-', sys.executable, "-c", program], cwd=ROOT)
    assert done.returncode == 0
    assert (tmp_path / "other").read_bytes() == b""
