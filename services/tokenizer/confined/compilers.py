"""Grammars compiled out of process, by a pool of children that starts with the first request that has one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from asyncio.subprocess import Process
from collections import OrderedDict

from services.tokenizer.confined.children import LONGEST, BrokenChildError, ChildPool, LateChildError, awake
from services.tokenizer.confined.frames import ChildSetup, Compilation, CompileJob
from shared.errors import RejectCode, RequestError
from shared.fairness.debts import Debts
from shared.processes.idle_time import LEAST_URGENT
from shared.requests.grammar import MAX_COMPILED_BYTES, Grammar, GrammarKind, check_grammar, refusal

NUM_COMPILERS = 2
PATIENCE = 30.0  # seconds that a request waits where a machine has no time for it; `resume_timeout` in service
COMPILE_TIMEOUT = 1.0  # seconds: with everything around it, an answer comes within two
MAX_SECONDS = 0.2  # of a processor; real schemas take some milliseconds, 63 at most (docs/structured.md)
REST = 4.0  # times the duration of a job, until its child takes another: a fifth of a child's time is the most there is
COSTLY = 0.03  # seconds of a processor, more than real schemas take
DEBT = 24.0  # times the duration of a costly job, until its tenant's next is taken ...
CREDIT = 2.0  # ... less so many seconds: one job that is just costly is no attack
REFUSAL = 1.5  # seconds that a tenant in debt waits at most: it is refused then, and asking again costs others nothing
LEAST_RETRY = 0.1  # seconds
MAX_MEMORY = 512 << 20
MAX_KNOWN = 256  # grammars whose outcome is remembered: at most 64 MB


class CompilerPool(ChildPool[Compilation]):
    """Compiles grammars; one costs at most `timeout` seconds of one child, and the second time nothing.

    Limits are counted in seconds of a processor, because a child may have to wait for one: a request waits for its turn
    and its answer up to `patience` seconds in all.
    """

    module = "services.tokenizer.confined.compiler"
    field, action = "grammar", "compile"
    niceness = LEAST_URGENT
    least_seconds = 0.1  # more than any real schema takes: a child that had less was kept waiting

    def __init__(self, *, num_compilers: int = NUM_COMPILERS, patience: float = PATIENCE) -> None:
        super().__init__(
            ChildSetup(max_memory=MAX_MEMORY, max_cpu_seconds=1),
            CompileJob(None),
            Compilation,
            timeout=COMPILE_TIMEOUT,
            patience=patience,
            max_answer_bytes=2 * MAX_COMPILED_BYTES,
            num_children=num_compilers,
        )
        self._known: OrderedDict[bytes, Compilation] = OrderedDict()
        self._debts = Debts(CREDIT)  # of tenants
        self._new = asyncio.Lock()  # of requests that are not under way: one of them at a time is in the queue ...
        self._queue = asyncio.Lock()  # ... for the next free child, so that streams under way come before the others

    async def compile(
        self, grammar: Grammar, allowance: float = 1.0, tenant: str = "", seconds: float = math.inf
    ) -> Grammar:
        """As a worker reads it.  Raises RequestError that names the field where it is none, or too much.

        `allowance`: times the usual that it may take; what failed with the usual one is then tried again.  `seconds`
        that there are for it, where that is less than `patience`.  A tenant that had costly grammars compiled waits
        before the next, and no other tenant does.
        """
        check_grammar(grammar)
        if grammar.kind is GrammarKind.COMPILED:
            raise refusal(grammar, "cannot be given compiled")
        name = hashlib.blake2b(f"{grammar.kind}:{grammar.text}".encode("utf-8", "surrogatepass")).digest()
        compilation = self._known.get(name)
        if compilation is None or (compilation.error and allowance > 1.0):
            compilation = await self._in_turn(name, grammar, allowance, tenant, min(seconds, self.patience))
        self._known[name] = compilation
        self._known.move_to_end(name)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if compilation.error:
            raise refusal(grammar, compilation.error)
        return Grammar(GrammarKind.COMPILED, compilation.text, grammar.field)

    async def _in_turn(
        self, name: bytes, grammar: Grammar, allowance: float, tenant: str, seconds: float
    ) -> Compilation:
        """Wait for a child: streams under way first, then the others in the order in which they came; but a tenant
        that got into debt meanwhile gives up its turn.  Where many wait for the same grammar, few compile it."""
        began = time.monotonic()
        is_under_way = allowance > 1.0  # then it was compiled before, and must not be lost to a debt
        try:
            async with awake(seconds):
                await self.started()
                while True:
                    if not is_under_way:
                        await self._out_of_debt(tenant, grammar)
                    async with contextlib.nullcontext() if is_under_way else self._new, self._queue:
                        child = await self._idle.get()
                    known = self._known.get(name)  # what others asked for meanwhile
                    if known is not None and not (known.error and is_under_way):
                        self.release(child)
                        return known
                    if is_under_way or self._debts.of(tenant) <= 0:
                        break
                    self.release(child)
        except TimeoutError:
            raise _not_now(grammar, f"waited for {seconds:.1f} s to be compiled", self.timeout) from None
        compilation = await self._compile(child, grammar, allowance, tenant, seconds - (time.monotonic() - began))
        self._charge(tenant, compilation.seconds)
        return compilation

    async def _compile(
        self, child: Process, grammar: Grammar, allowance: float, tenant: str, seconds: float
    ) -> Compilation:
        began = time.monotonic()
        job, usual = CompileJob(grammar, allowance * MAX_SECONDS), allowance * self.timeout
        try:
            return await self.work(child, job, usual, max(LONGEST, seconds / usual))
        except LateChildError as late:
            if late.seconds >= job.max_seconds:
                return Compilation(error=f"takes more than {self.timeout} s to compile", seconds=self.timeout)
            # Perhaps it is the machine, and not the grammar: so nothing is remembered.
            if late.seconds >= COSTLY:
                self._charge(tenant, self.timeout)
            reason = f"was not compiled in time: its process got only {late.seconds:.2f} s of processor time"
            raise _not_now(grammar, reason, max(self.timeout, self._debts.of(tenant))) from None
        except BrokenChildError:
            error = f"takes more than 1 s of processor time, or {MAX_MEMORY >> 20} MB, to compile"
            return Compilation(error=error, seconds=min(time.monotonic() - began, self.timeout))

    async def _out_of_debt(self, tenant: str, grammar: Grammar) -> None:
        """Wait until a tenant may have another grammar compiled; raises RequestError where that takes too long."""
        if (wait := self._debts.of(tenant)) > 0:
            await asyncio.sleep(min(wait, REFUSAL))
        if (left := self._debts.of(tenant)) > 0:
            reason = "must wait: earlier formats of this tenant took long to compile"
            raise _not_now(grammar, reason, max(left, LEAST_RETRY))

    def _charge(self, tenant: str, seconds: float) -> None:
        if seconds > COSTLY:
            self._debts.charge(tenant, DEBT * seconds)

    def rest_after(self, answer: Compilation) -> float:
        return REST * answer.seconds


def _not_now(grammar: Grammar, reason: str, seconds: float) -> RequestError:
    return RequestError(
        f"{grammar.field} {reason}",
        field=grammar.field,
        code=RejectCode.RESOURCE_EXHAUSTED,
        retry_after_ms=int(1000 * seconds),
    )
