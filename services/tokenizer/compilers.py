"""Grammars compiled out of process, by a pool of children that starts with the first request that has one."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict

import msgspec

from services.tokenizer.children import BrokenChildError, ChildPool, LateChildError, NoChildFreeError
from services.tokenizer.frames import Compilation, CompileJob, CompileSetup
from shared.errors import FatalError, RejectCode, RequestError
from shared.grammar import MAX_COMPILED_BYTES, Grammar, GrammarKind, check_grammar, refusal
from shared.idle_time import LEAST_URGENT

NUM_COMPILERS = 2
PATIENCE = 0.5  # seconds to wait for a child
COMPILE_TIMEOUT = 1.0  # seconds: with everything around it, an answer comes within two
MAX_SECONDS = 0.2  # of a processor; real schemas take some milliseconds, 63 at most (docs/structured.md)
REST = 4.0  # times what one took, until its child takes another: a fifth of a child's time is the most there is
COSTLY = 0.03  # seconds of a processor, more than real schemas take
DEBT = 24.0  # times what a costly one took, until its tenant's next is taken ...
CREDIT = 2.0  # ... but for so many seconds: one that is just costly is nobody's attack
REFUSAL = 1.5  # seconds until who is in debt is told so: asking again at once would cost others a request each time
LEAST_RETRY = 0.1  # seconds
MAX_MEMORY = 512 << 20
MAX_KNOWN = 256  # grammars whose outcome is remembered: at most 64 MB

_compilation = msgspec.msgpack.Decoder(Compilation)


class CompilerPool(ChildPool[Compilation]):
    """Compiles grammars; one costs at most `timeout` seconds of one child, and the second time nothing."""

    def __init__(self, *, timeout: float = COMPILE_TIMEOUT, num_compilers: int = NUM_COMPILERS) -> None:
        super().__init__(
            "services.tokenizer.compiler",
            setup=CompileSetup(max_memory=MAX_MEMORY, max_cpu_seconds=1),
            probe=CompileJob(None),
            answers=_compilation,
            timeout=timeout,
            patience=PATIENCE,
            max_answer_bytes=2 * MAX_COMPILED_BYTES,
            num_children=num_compilers,
            niceness=LEAST_URGENT,
            least_seconds=COSTLY,
        )
        self._known: OrderedDict[bytes, Compilation] = OrderedDict()
        self._debts: dict[str, float] = {}  # by tenant: the monotonic time at which it has paid
        self._starting: asyncio.Task[None] | None = None

    async def compile(self, grammar: Grammar, allowance: float = 1.0, tenant: str = "") -> Grammar:
        """As a worker reads it.  Raises RequestError that names the field where it is none, or too much.

        `allowance`: times the usual that it may wait and take; what failed with the usual one is then tried again.
        Who had costly ones compiled waits before the next, and nobody else does.
        """
        check_grammar(grammar)
        if grammar.kind is GrammarKind.COMPILED:
            raise refusal(grammar, "cannot be given compiled")
        name = hashlib.blake2b(f"{grammar.kind}:{grammar.text}".encode("utf-8", "surrogatepass")).digest()
        compilation = self._known.get(name)
        if compilation is None or (compilation.error and allowance > 1.0):
            if allowance == 1.0:  # a stream under way has paid already, and must not be lost to a debt
                await self._out_of_debt(tenant, grammar)
            compilation = await self._compile(grammar, allowance, tenant)
            self._charge(tenant, compilation.seconds)
        self._remember(name, compilation)
        if compilation.error:
            raise refusal(grammar, compilation.error)
        return Grammar(GrammarKind.COMPILED, compilation.text, grammar.field)

    async def _compile(self, grammar: Grammar, allowance: float, tenant: str) -> Compilation:
        await self._started()
        began = time.monotonic()
        try:
            return await self.ask(CompileJob(grammar, allowance * MAX_SECONDS), allowance)
        except NoChildFreeError:
            raise _not_now(grammar, f"waited for {PATIENCE} s to be compiled", self.timeout) from None
        except LateChildError as late:
            if late.seconds >= MAX_SECONDS:
                return Compilation(error=f"takes more than {self.timeout} s to compile", seconds=self.timeout)
            # Perhaps it is the machine, and not the grammar: so nothing is remembered.
            if late.seconds >= COSTLY:
                self._charge(tenant, self.timeout)
            reason = f"was not compiled in time: it had a processor for {late.seconds:.2f} s"
            raise _not_now(grammar, reason, max(self.timeout, self._debt(tenant))) from None
        except BrokenChildError:
            error = f"takes more than 1 s of processor time, or {MAX_MEMORY >> 20} MB, to compile"
            return Compilation(error=error, seconds=min(time.monotonic() - began, self.timeout))

    async def _out_of_debt(self, tenant: str, grammar: Grammar) -> None:
        """Wait until a tenant may have another one compiled.  Who is refused has waited too, and longer than who is
        served, so that asking again and again is no attack either."""
        wait = self._debt(tenant)
        if wait > PATIENCE:
            await asyncio.sleep(REFUSAL)
            left = max(self._debt(tenant), LEAST_RETRY)
            raise _not_now(grammar, "has to wait: formats before it took long to compile", left)
        if wait > 0:
            await asyncio.sleep(wait)

    def _debt(self, tenant: str) -> float:
        """Seconds until a tenant has paid; none or less where it may have another one compiled."""
        return self._debts.get(tenant, 0.0) - CREDIT - time.monotonic()

    def _charge(self, tenant: str, seconds: float) -> None:
        if seconds > COSTLY:
            now = time.monotonic()
            self._debts = {name: end for name, end in self._debts.items() if end > now}
            self._debts[tenant] = self._debts.get(tenant, now) + DEBT * seconds

    def rest_after(self, answer: Compilation) -> float:
        return REST * answer.seconds

    async def _started(self) -> None:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self.start())
        try:
            await asyncio.shield(self._starting)
        except FatalError as error:
            self._starting = None
            raise RequestError(str(error), code=RejectCode.UNAVAILABLE) from error

    def _remember(self, name: bytes, compilation: Compilation) -> None:
        self._known[name] = compilation
        self._known.move_to_end(name)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """Kill all children, those that are just coming up too."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        await super().close()


def _not_now(grammar: Grammar, reason: str, seconds: float) -> RequestError:
    return RequestError(
        f"{grammar.field} {reason}",
        field=grammar.field,
        code=RejectCode.RESOURCE_EXHAUSTED,
        retry_after_ms=int(1000 * seconds),
    )
