"""A rolling restart: every process of a deployment is replaced, one after the other, while the others work.

Like the supervisor it knows neither processes nor the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from services.cli.supervisor import ChildProcess, Supervisor

ORDER = ("detokenizer", "tokenizer", "draft", "worker", "scheduler", "gateway")
OVERLAPPING = frozenset({"detokenizer", "tokenizer", "gateway"})  # small enough to be there twice for a while
READY_SECONDS = 120.0  # that a successor has to be ready


class RestartFailedError(Exception):
    """A successor was not ready in time; who is not replaced yet stays."""


def rolling_restart(
    supervisor: Supervisor,
    services: Iterable[str],
    is_ready: Callable[[ChildProcess], bool],
    *,
    report: Callable[[str], None],
    clock: Callable[[], float],
) -> Iterator[None]:
    """Replace everybody of these services; to be advanced between the supervisor's polls.

    Raises RestartFailedError where a successor does not become ready.
    """
    for service in [service for service in ORDER if service in set(services)]:
        for child in supervisor.cast(service):
            begun = clock()
            replace = _overlap if service in OVERLAPPING else _succeed
            yield from replace(supervisor, child, _in_time(is_ready, begun, clock))
            report(f"{child.role.name} was replaced in {clock() - begun:.1f} s")


def _overlap(supervisor: Supervisor, child: ChildProcess, is_ready: Callable[[ChildProcess], bool]) -> Iterator[None]:
    """The successor is ready before its predecessor leaves."""
    successor = supervisor.engage(child.role)
    try:
        while not is_ready(successor):
            yield
    except RestartFailedError:
        supervisor.dismiss(successor)
        raise
    supervisor.dismiss(child)
    while child in supervisor.children:
        yield


def _succeed(supervisor: Supervisor, child: ChildProcess, is_ready: Callable[[ChildProcess], bool]) -> Iterator[None]:
    """The predecessor leaves first: there is no room for two, or no place."""
    life = child.num_lives
    supervisor.dismiss(child, replace=True)
    while child.num_lives == life or not is_ready(child):
        yield


def _in_time(
    is_ready: Callable[[ChildProcess], bool], begun: float, clock: Callable[[], float]
) -> Callable[[ChildProcess], bool]:
    """`is_ready`, but it raises RestartFailedError where that is not so in time."""

    def is_ready_by_now(child: ChildProcess) -> bool:
        ready = is_ready(child)
        if not ready and clock() - begun > READY_SECONDS:
            raise RestartFailedError(f"the next {child.role.name} was not ready within {READY_SECONDS:g} s")
        return ready

    return is_ready_by_now
