"""How the native kernels are come by: compiled once, cached privately, or done without in one log line."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from engine.loading.backend import usable_cores
from engine.loading.load import load_runner
from kernels.cpu.binding import build, loading, native, self_check
from kernels.cpu.binding.build import NATIVE, TARGETS, BuildError, library
from shared.config import Settings
from shared.errors import ConfigError
from tests.engine.checkpoints import random_prompt
from tests.engine.driver import Driver

ROOT = Path(__file__).resolve().parents[3]
MODEL = str(ROOT / "models" / "pageant-stories-draft")
EVERYTHING = frozenset().union(*(target.needs for target in TARGETS.values()))
USERS_CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # before a test has another home
TINY = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of one's own."""
    without_fallback(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PAUSES", (0.0, 0.0))
    loading.load_file.cache_clear()
    return tmp_path / "cache" / "pageant" / "native"


def without_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other place for a cache: all of them would be in a file."""
    (tmp_path / "file").touch()
    for name in ("XDG_CACHE_HOME", "CACHE_DIRECTORY", "HOME", "PAGEANT_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "file" / "in"))
    monkeypatch.setattr(build, "_temporary", lambda: tmp_path / "file" / "in")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that are compiled in no time."""
    if not any(shutil.which(name) for name in build.COMPILERS):
        pytest.skip("no C++ compiler")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(TINY.replace("ANSWER", "42"), encoding="utf-8")
    monkeypatch.setattr(build, "SOURCES", sources)
    return sources


def built(**arguments: Any) -> Path:
    with library(**arguments) as path:
        assert path.read_bytes()[:4] == b"\x7fELF"
        return path


def test_compiled_once_and_found_again(cache: Path, tiny: Path) -> None:
    announced: list[str] = []
    first = built(announce=announced.append)
    assert built(announce=announced.append) == first
    assert len(announced) == 1
    assert first.parent == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(first.stat().st_mode) == 0o755, "an image's user reads what its builder made"


def test_who_may_not_compile_takes_what_is_there(cache: Path, tiny: Path) -> None:
    with pytest.raises(BuildError, match="not been compiled yet"):
        built(may_compile=False)
    assert not list(cache.iterdir()), "and asks no compiler"
    compiled = built()
    assert built(may_compile=False) == compiled
    compiled.unlink()
    assert loading.load_compiled() is None


def test_compiled_again_for_whatever_it_depends_on(cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {built(), built(defines=("A",))}
    (tiny / "tiny.cpp").write_text(TINY.replace("ANSWER", "43"), encoding="utf-8")
    found.add(built())
    (tiny / "more.h").write_text("// a header\n", encoding="utf-8")
    found.add(built())
    monkeypatch.setattr(build, "processor_features", lambda: EVERYTHING | {"another"})
    found.add(built())
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-Wall"))
    found.add(built())
    assert len(found) == 6
    assert all(path.is_file() for path in found)


def test_several_workers_start_at_once(cache: Path, tiny: Path) -> None:
    program = textwrap.dedent(f"""
        import pathlib
        from kernels.cpu.binding import build
        build.SOURCES = pathlib.Path({str(tiny)!r})
        with build.library(announce=lambda compiler: print("compiled")) as path:
            print(path)
    """)
    workers = [
        subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    printed = "".join(worker.communicate(timeout=120)[0] for worker in workers)
    assert all(worker.returncode == 0 for worker in workers)
    assert printed.count("compiled") == 1
    assert printed.count(str(cache)) == 4
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".so"], "the lock, the library and nothing else"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_cache_that_others_can_write_to_is_not_used(cache: Path, tiny: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    with library() as path:
        assert cache not in path.parents
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists(), "it was for this process alone"
    assert not list(cache.iterdir())


def test_nor_one_in_a_place_that_others_can_swap(cache: Path, tiny: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    cache.parent.chmod(0o777)
    with library() as path:
        assert cache not in path.parents


def test_a_cache_that_cannot_be_made(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_fallback(tmp_path, monkeypatch)
    assert not built_and_gone().exists()


@pytest.mark.parametrize("name", ["CACHE_DIRECTORY", "HOME", "PAGEANT_RUNTIME_DIR", ""])
def test_without_a_cache_in_the_home_another_directory_keeps_it(
    name: str, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's or a systemd service's user has no home that it can write to."""
    without_fallback(tmp_path, monkeypatch)
    if name:
        monkeypatch.setenv(name, str(tmp_path / "place"))
    else:
        monkeypatch.setattr(build, "_temporary", lambda: tmp_path / "place")
    path = built_and_gone()
    assert path.exists() and tmp_path / "place" in path.parents, "it is there for the next worker"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    announced: list[str] = []
    with library(announce=announced.append) as again:
        assert again == path and not announced


def built_and_gone() -> Path:
    with library() as path:
        assert path.is_file()
    return path


def test_a_prebuilt_one_is_preferred(cache: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best that the processor can run, without a compiler; of other sources, none."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "compile_library", lambda output, compiler, flags: output.write_bytes(b"\x7fELF"))
    assert build.main(["--into", str(tmp_path / "prebuilt"), "x86-64-v3", "cascadelake", "cooperlake"]) == 0
    monkeypatch.setenv("PATH", "")
    needs = {name: target.needs for name, target in TARGETS.items()}
    for features, best in ((EVERYTHING, "cooperlake"), (needs["cascadelake"], "cascadelake")):
        monkeypatch.setattr(build, "processor_features", lambda features=features: features)
        assert built().name.startswith(best + "-")
    monkeypatch.setattr(build, "processor_features", lambda: needs["x86-64-v4"])
    assert built().name.startswith("x86-64-v3-"), "there is none for x86-64-v4"
    assert built(target="x86-64-v3").name.startswith("x86-64-v3-")
    with pytest.raises(BuildError, match="lacks avx512_bf16, avx512_vnni of cooperlake"):
        built(target="cooperlake")
    (tiny / "tiny.cpp").write_text("// changed\n", encoding="utf-8")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        built()


def test_targets_are_in_order_of_what_they_need() -> None:
    needs = [target.needs for target in TARGETS.values()]
    assert all(better > worse for better, worse in itertools.pairwise(needs))


def test_a_compile_error_is_told_in_one_line(cache: Path, tiny: Path) -> None:
    (tiny / "tiny.cpp").write_text("int x = nonsense;\n", encoding="utf-8")
    with pytest.raises(BuildError, match="nonsense") as caught:
        built()
    assert "\n" not in str(caught.value)
    assert [path.name for path in cache.iterdir()] == ["lock"], "nothing half-made is left"


def compiler_that_works_at_last(folder: Path, attempts: int) -> Path:
    """It is killed, as for want of memory, until it is asked for the last time."""
    fake = folder / "c++"
    real = next(path for name in build.COMPILERS if (path := shutil.which(name)))
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\necho x >>{folder}/asked\n'
        f'[ $(wc -l <{folder}/asked) -lt {attempts} ] && kill -9 $$\nexec {real} "$@"\n'
    )
    fake.chmod(0o755)
    return fake


def test_a_compiler_that_fails_for_now_is_asked_again(
    cache: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a worker would compute with torch what its siblings compute with native kernels."""
    monkeypatch.setenv("CXX", str(compiler_that_works_at_last(tmp_path, 3)))
    announced: list[str] = []
    assert built(announce=announced.append).is_file()
    assert len(announced) == 3


def test_a_compiler_that_never_works_is_given_up(
    cache: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(compiler_that_works_at_last(tmp_path, 4)))
    with pytest.raises(BuildError, match="3 attempts"):
        built()
    assert built().is_file(), "the next worker asks anew"


def test_a_compiler_that_hangs_is_ended_with_all_it_started(
    cache: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "c++"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho $$ >{tmp_path}/pid\nsleep 77 & wait\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setattr(build, "TIMEOUT", 1.0)
    with pytest.raises(BuildError, match="took longer than 1 s"):
        built()
    group = (tmp_path / "pid").read_text().strip()
    states = [Path(path).read_text().split() for path in map(str, Path("/proc").glob("[0-9]*/stat"))]
    assert not [fields for fields in states if fields[4] == group and fields[2] != "Z"]


# ---- what the worker makes of it


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The worker's log lines."""
    logger = structlog.testing.CapturingLogger()
    captured: list[dict[str, Any]] = []

    def keep(_: Any, level: str, event: MutableMapping[str, Any]) -> str:
        captured.append({"level": level, **event})
        raise structlog.DropEvent

    monkeypatch.setattr("engine.loading.backend.log", structlog.wrap_logger(logger, processors=[keep]))
    return captured


def greedy(**settings: Any) -> list[int]:
    runner = load_runner(Settings.of(model=MODEL, num_blocks=32, **settings))
    driver = Driver(runner)
    sequence = driver.add(0, random_prompt(20, seed=1, vocab_size=runner.capacity.vocab_size))
    driver.generate(12)
    return sequence.output


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")


def compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")


def old_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "processor_features", lambda: frozenset({"sse2", "avx"}))


def wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "check_linear", lambda native, dtype: False)
    monkeypatch.setenv("XDG_CACHE_HOME", USERS_CACHE)  # a library is there, as a rule


REASONS = {
    no_compiler: "no C++ compiler was found",
    compiler_that_fails: "false failed",
    compiler_that_is_missing: "/nowhere/c++",
    old_processor: "neither AVX-512 nor AVX2",
    wrong_results: "linear in torch.float32 differs from its reference",
}


@pytest.mark.parametrize("lack", REASONS, ids=lambda lack: lack.__name__)
def test_without_native_kernels_the_same_tokens_and_one_line(
    lack: Any, cache: Path, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if lack is wrong_results and not any(shutil.which(name) for name in build.COMPILERS):
        pytest.skip("no C++ compiler")
    wanted = greedy(kernels="torch")
    assert not events
    lack(monkeypatch)
    assert greedy() == wanted
    warnings = [event for event in events if event["level"] == "warning"]
    assert [event["event"] for event in warnings] == ["native_kernels_unavailable"]
    assert REASONS[lack] in warnings[0]["reason"]
    assert "slower" in warnings[0]["instead"]
    with pytest.raises(ConfigError, match="kernels is 'native', but "):
        greedy(kernels="native")
    loading.load_file.cache_clear()


def test_a_model_that_is_not_served(events: list[dict[str, Any]]) -> None:
    try:
        loading.load(NATIVE)
    except native.NativeUnavailable as error:
        pytest.skip(f"no native kernels: {error}")
    assert len(greedy(dtype="float16")) == 12
    (event,) = [event for event in events if event["level"] == "warning"]
    assert "this model is not served: they do not compute in float16" in event["reason"]
    with pytest.raises(ConfigError, match="they do not compute in float16"):
        greedy(dtype="float16", kernels="native")


def test_cores() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
