"""Compiles the native kernels for this processor, once, and finds what was compiled before.

    python -m kernels.cpu.binding.build                         into the user's cache, for this machine
    python -m kernels.cpu.binding.build --into DIR TARGET ...   for machines like TARGET; images have them in `prebuilt`

A cached library is only ever loaded from a directory to which no user but this one and root can write.  This module
needs Python alone, so that it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "native"
PREBUILT = Path(__file__).resolve().parents[1] / "prebuilt"
CPUINFO = Path("/proc/cpuinfo")
COMPILERS = ("c++", "g++", "clang++")
# Contraction is off because the sources say themselves where a product and a sum are fused.
# A loop that begins within a line of the processor's cache of decoded instructions took 3 % longer (AMD's Zen 3).
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-falign-loops=64", "-fPIC",
    "-pthread",
)  # fmt: skip
TIMEOUT = 300.0  # seconds for one source, which takes seconds where nothing else runs
MOST_AT_A_TIME = 16  # sources: each takes some 300 MB
PAUSES = (1.0, 4.0)  # seconds before a compilation that failed is tried again: memory, processes, disk come back
NATIVE = "native"

Announce = Callable[[str], None]  # called with the compiler before it starts, which takes a minute of one core


class BuildError(Exception):
    """There is no library for this machine, in words for a log line."""


class CompilerFailedError(BuildError):
    """The compiler is there and did not do it this time: it may have been killed, or have had no room."""


@dataclass(frozen=True, slots=True)
class BuildTarget:
    """A kind of processor: what the compiler is told, and what /proc/cpuinfo must list."""

    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset(("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_VECTORS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
TARGETS: dict[str, BuildTarget] = {  # the best first
    "sapphirerapids": BuildTarget(
        (*_VECTORS, "-mamx-tile", "-mamx-int8", "-mamx-bf16"), _BF16 | {"amx_tile", "amx_int8", "amx_bf16"}
    ),
    "cooperlake": BuildTarget(_VECTORS, _BF16),
    "cascadelake": BuildTarget(("-march=x86-64-v4", "-mavx512vnni"), _VNNI),
    "x86-64-v4": BuildTarget(("-march=x86-64-v4",), _V4),
    "x86-64-v3": BuildTarget(("-march=x86-64-v3",), _V3),
}


@contextmanager
def library(
    target: str = NATIVE,
    *,
    defines: Sequence[str] = (),
    announce: Announce = lambda compiler: None,
    may_compile: bool = True,
) -> Iterator[Path]:
    """A compiled library for `target` (one of TARGETS, or NATIVE) to load within the context.  Raises BuildError.

    `defines` are macros for tests.
    """
    features = processor_features()
    chosen = _served(target, features)
    for name in chosen if not defines else ():
        if (prebuilt := PREBUILT / _prebuilt_name(name)).is_file():
            yield prebuilt
            return
    compiler = find_compiler()
    flags = (*(TARGETS[target].flags if target != NATIVE else ("-march=native",)), *(f"-D{name}" for name in defines))
    name = f"{target}-{_digest(flags, _version(compiler), *sorted(features))}.so"
    with _cache() as folder:
        if not may_compile and not (folder / name).is_file():
            raise BuildError("the library has not been compiled yet")
        yield _compiled_once(folder / name, compiler, flags, announce)


def processor_features() -> frozenset[str]:
    """What Linux says that the processor can do; empty where it does not say."""
    try:
        lines = CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def _served(target: str, features: frozenset[str]) -> list[str]:
    """The names of TARGETS whose libraries may run here, the best first."""
    fitting = [name for name, one in TARGETS.items() if one.needs <= features]
    if not fitting:
        raise BuildError(f"this processor ({platform.machine()}) has neither AVX-512 nor AVX2 with FMA")
    if target == NATIVE:
        return fitting
    if target not in fitting:
        raise BuildError(f"this processor lacks {', '.join(sorted(TARGETS[target].needs - features))} of {target}")
    return [target]


def find_compiler() -> list[str]:
    """The C++ compiler's command: CXX, or the first there is.  Raises BuildError."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError(f"no C++ compiler was found ({', '.join(COMPILERS)}, or CXX)")
    return [found]


def compile_library(output: Path, compiler: Sequence[str], flags: Sequence[str]) -> None:
    """All sources, as many at a time as there are cores, into `output`, which appears whole or not at all.

    Raises BuildError.
    """
    command = [*compiler, *FLAGS, f"-I{SOURCES}", *flags]
    cores = min(len(os.sched_getaffinity(0)), MOST_AT_A_TIME)
    with (
        tempfile.TemporaryDirectory(dir=output.parent, prefix=output.stem) as folder,
        ThreadPoolExecutor(cores) as pool,
    ):
        partial = Path(folder) / output.name
        objects = {str(path): f"{folder}/{path.stem}.o" for path in sorted(SOURCES.rglob("*.cpp"))}
        try:
            list(pool.map(lambda pair: _compile([*command, "-c", pair[0], "-o", pair[1]]), objects.items()))
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
        _compile([*command, "-shared", *objects.values(), "-o", str(partial)])
        partial.chmod(0o755)
        partial.replace(output)


def _compile(command: Sequence[str]) -> None:
    status, errors = _run(command)
    if status:
        raise CompilerFailedError(f"{command[0]} failed: {_first_error(errors)}")


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and standard error.  Raises BuildError where it cannot start or takes too long."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise BuildError(f"cannot run {command[0]}: {error.strerror}") from error
    except OSError as error:  # no process, no memory, for now
        raise CompilerFailedError(f"cannot run {command[0]}: {error.strerror}") from error
    try:
        errors = process.communicate(timeout=TIMEOUT)[1]
        return process.returncode, errors
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)  # the driver's children too
        process.communicate()
        raise BuildError(f"{command[0]} took longer than {TIMEOUT:g} s") from error


def _compiled_once(output: Path, compiler: Sequence[str], flags: Sequence[str], announce: Announce) -> Path:
    """Of several workers that start at once, one compiles and the others wait for it, but not for another library."""
    if output.is_file():
        return output
    with (output.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.is_file():
            _compile_patiently(output, compiler, flags, announce)
    return output


def _compile_patiently(output: Path, compiler: Sequence[str], flags: Sequence[str], announce: Announce) -> None:
    """A failure that passes must not change what a deployment computes with: the compiler is asked again."""
    for pause in (*PAUSES, None):
        announce(compiler[0])
        try:
            compile_library(output, compiler, flags)
            return
        except CompilerFailedError as error:
            if pause is None:
                raise BuildError(f"{error} ({1 + len(PAUSES)} attempts)") from error
            time.sleep(pause)


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")


def _version(compiler: Sequence[str]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot run {compiler[0]}: {error}") from error
    return done.stdout


def _digest(*parts: object) -> str:
    """Names a compilation: the sources, and whatever else it depends on."""
    digest = hashlib.blake2b(repr((FLAGS, parts)).encode(), digest_size=12)
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def source_digest() -> str:
    """A digest of the sources: libraries of other sources may compute other bits."""
    return _digest()[:8]


def _prebuilt_name(target: str) -> str:
    return f"{target}-{_digest(TARGETS[target].flags)}.so"


@contextmanager
def _cache() -> Iterator[Path]:
    """The first directory that we may keep libraries in; where there is none, one of this process alone."""
    for base in _bases():
        folder = base / "pageant" / "native"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            usable = is_private(folder) and os.access(folder, os.W_OK | os.X_OK)
        except OSError:
            usable = False
        if usable:
            yield folder
            return
    with tempfile.TemporaryDirectory(prefix="pageant-native-") as private:
        yield Path(private)


def _bases() -> Iterator[Path]:
    """The user's cache, systemd's (CacheDirectory=), the deployment's own directory, and one of this user's for
    temporary files: a service's user may have no home, or none that it can write to."""
    for name in ("XDG_CACHE_HOME", "CACHE_DIRECTORY"):
        if (value := os.environ.get(name, "").partition(":")[0]).startswith("/"):
            yield Path(value)
    home = os.path.expanduser("~")  # noqa: PTH111 - raises nothing
    if home.startswith("/"):
        yield Path(home) / ".cache"
    if (runtime := os.environ.get("PAGEANT_RUNTIME_DIR", "")).startswith("/"):
        yield Path(runtime)
    yield _temporary()


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"pageant-{os.getuid()}"


def is_private(folder: Path) -> bool:
    """Whether no user but this one and root can put a file there, or another directory in the place of it."""
    folder = folder.resolve()
    for path in (folder, *folder.parents):
        status = path.stat()
        above = path != folder
        alone = above and status.st_gid == os.getuid()  # a group of one's own has one's own number
        sticky = above and status.st_mode & stat.S_ISVTX
        if status.st_uid not in (os.getuid(), 0) or (status.st_mode & (0o002 if alone else 0o022) and not sticky):
            return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.binding.build", description=__doc__.split("\n")[0])
    parser.add_argument("--into", type=Path, help="a directory for libraries of the named targets")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET", help=", ".join(TARGETS))
    given = parser.parse_args(arguments)
    try:
        if given.into is None:
            with library() as path:
                print(path)
            return 0
        given.into.mkdir(parents=True, exist_ok=True)
        if platform.machine() not in ("x86_64", "AMD64"):
            print(f"pageant: nothing is prebuilt for {platform.machine()}", file=sys.stderr)
            return 0
        for target in given.targets or TARGETS:
            path = given.into / _prebuilt_name(target)
            compile_library(path, find_compiler(), TARGETS[target].flags)
            print(path)
    except BuildError as error:
        print(f"pageant: no native kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
