"""What /proc says of processes: descendants, processor time, memory."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from shared.processes.proc import PROC, TICK, own_seconds, stat

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessUsage:
    """Of one process so far: processor seconds of user and system together, and resident bytes now."""

    seconds: float
    resident: int


def usage(pid: int) -> ProcessUsage:
    """Raises OSError where the process is gone."""
    pages = int((PROC / str(pid) / "statm").read_text(encoding="utf-8").split()[1])
    fields = stat(pid)
    if fields is None:
        raise ProcessLookupError(f"process {pid} is gone")
    return ProcessUsage(own_seconds(fields), pages * PAGE)


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {int(entry.name): int(fields[1]) for entry in PROC.glob("[0-9]*") if (fields := stat(int(entry.name)))}
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of its children that have ended."""
    fields = stat(pid)
    return sum(map(int, fields[11:15])) / TICK if fields else 0.0


def tree_cpu_seconds(root: int) -> float:
    return sum(map(cpu_seconds, tree(root)))


def machine_cpu_seconds() -> float:
    """Processor time of all processes, and what the hypervisor took."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _first_line("stat").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICK


def load_average() -> float:
    return float(_first_line("loadavg").split()[0])


def peak_rss(pid: int) -> int:
    """The most bytes of memory that a process has had."""
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def processor() -> str:
    """The processor's name and how many of its cores are ours."""
    lines = (PROC / "cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), os.uname().machine)
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16."""
    flags = (PROC / "cpuinfo").read_text()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def service_pids(root: int, service: str) -> list[int]:
    """The processes of a service among those that descend from one."""
    return [pid for pid in tree(root) if _command(pid).endswith(f"services.{service}")]


def _command(pid: int) -> str:
    """Empty where the process is gone."""
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def _first_line(name: str) -> str:
    return (PROC / name).read_text().partition("\n")[0]
