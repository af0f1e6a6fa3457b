"""Speaks to the `pageant serve` that supervises this gateway, where there is one."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from shared.errors import RejectCode, RequestError
from shared.processes.supervision import ACCEPTED, BUSY, SupervisionReport, SupervisorOrder, desk_path

ANSWER_SECONDS = 2.0  # it looks at its socket twenty times a second
MAX_ANSWER = 1 << 20  # bytes of a report
ABSENT = (
    "no `pageant serve` supervises this gateway's processes: restart and scale them where they were started "
    "(in containers: `docker compose restart SERVICE`, `docker compose up -d --scale SERVICE=COUNT`)"
)


class SupervisorLink:
    """A connection for each question: the supervisor may come, go and be another one."""

    def __init__(self, runtime_path: Path) -> None:
        self._path = desk_path(runtime_path)

    async def report(self) -> SupervisionReport | None:
        """What it says of its processes; None where there is no supervisor, or it does not answer."""
        try:
            return msgspec.json.decode(await self._ask(SupervisorOrder(report=True)), type=SupervisionReport)
        except (OSError, TimeoutError, ValueError):  # an older one knows no reports
            return None

    async def give(self, order: SupervisorOrder) -> None:
        """Have an order put into its queue.  Raises RequestError where it is refused, or nothing takes orders."""
        try:
            answer = await self._ask(order)
        except (FileNotFoundError, ConnectionRefusedError):
            raise RequestError(ABSENT, code=RejectCode.NOT_FOUND) from None
        except (OSError, TimeoutError, ValueError) as error:
            text = f"`pageant serve` did not accept the order: {error or type(error).__name__}"
            raise RequestError(text, code=RejectCode.UNAVAILABLE) from None
        if answer.startswith(BUSY):
            raise RequestError(f"the supervisor says: {answer}", code=RejectCode.RESOURCE_EXHAUSTED)
        if answer != ACCEPTED:
            raise RequestError(answer, field="services" if order.restart else "replicas")

    async def _ask(self, order: SupervisorOrder) -> str:
        """The first line of its answer."""
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(self._path), limit=MAX_ANSWER)
            try:
                writer.write(msgspec.json.encode(order) + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        if not line:
            raise ValueError("it closed the connection without an answer")
        return line.decode("utf-8", "replace").rstrip("\n")
