"""One compiling child: python -m services.tokenizer.confined.compiler

It takes only time of a processor that no other process wants.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import process_time

from services.tokenizer.confined.confinement import serve
from services.tokenizer.confined.frames import ChildSetup, Compilation, CompileJob
from shared.automata.compiling import Compiler
from shared.automata.limits import GrammarError
from shared.processes.idle_time import take_idle_time_only
from shared.requests.grammar import Grammar, GrammarKind


def prepare(_: ChildSetup) -> Callable[[CompileJob], Compilation]:
    compiler = Compiler()
    compiler.compile(Grammar(GrammarKind.JSON_OBJECT))  # has everything read that is read late
    take_idle_time_only()
    return partial(compile_one, compiler)


def compile_one(compiler: Compiler, job: CompileJob) -> Compilation:
    """Every grammar has an answer, as long as this process lives."""
    if job.grammar is None:
        return Compilation()
    text, error, begin = "", "", process_time()
    try:
        text = compiler.compile(job.grammar)
    except GrammarError as caught:
        error = str(caught)
    except MemoryError:
        error = "takes too much memory"
    except RecursionError:
        error = "is nested too deeply"
    except Exception as caught:
        error = f"cannot be compiled: {type(caught).__name__}"
    spent = process_time() - begin
    if not error and spent > job.max_seconds:
        error = f"takes {spent:.2f} s of a processor to compile, the limit is {job.max_seconds}"
    return Compilation("" if error else text, error, spent)


if __name__ == "__main__":
    serve(ChildSetup, CompileJob, prepare)
