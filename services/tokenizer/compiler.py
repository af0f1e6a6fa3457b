"""One compiling child: python -m services.tokenizer.compiler

Reads a setup and then grammars from standard input, and answers each on standard output.  It is confined before it sees
a grammar (`services.tokenizer.confinement`), and takes only time that nobody else wants.
"""

from __future__ import annotations

import os
import sys
from time import process_time

import msgspec

from services.tokenizer.confinement import confine, die_with_parent, limit_cpu, read_frame
from services.tokenizer.frames import Compilation, CompileJob, CompileSetup, to_frame
from shared.automata.compiling import Compiler
from shared.automata.limits import GrammarError
from shared.grammar import Grammar, GrammarKind
from shared.idle_time import take_idle_time_only


def main() -> None:
    """Serve until the parent closes the pipe."""
    die_with_parent(os.getppid())
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    frame = read_frame(requests)
    if frame is None:
        return
    setup = msgspec.msgpack.decode(frame, type=CompileSetup)
    compiler = Compiler()
    compiler.compile(Grammar(GrammarKind.JSON_OBJECT))  # has everything read that is read late
    take_idle_time_only()
    confine(setup.max_memory)
    jobs = msgspec.msgpack.Decoder(CompileJob)
    while (frame := read_frame(requests)) is not None:
        limit_cpu(setup.max_cpu_seconds)
        answers.write(to_frame(compile_one(compiler, jobs.decode(frame))))
        answers.flush()


def compile_one(compiler: Compiler, job: CompileJob) -> Compilation:
    """Whatever a grammar makes the engine do, it has an answer, as long as this process lives."""
    if job.grammar is None:
        return Compilation()
    begin = process_time()
    text, error = _compile(compiler, job.grammar)
    spent = process_time() - begin
    if not error and spent > job.max_seconds:
        error = f"takes {spent:.2f} s of a processor to compile, the limit is {job.max_seconds}"
    return Compilation("" if error else text, error, spent)


def _compile(compiler: Compiler, grammar: Grammar) -> tuple[str, str]:
    """The engine's text, or an error."""
    try:
        return compiler.compile(grammar), ""
    except GrammarError as error:
        return "", str(error)
    except MemoryError:
        return "", "takes too much memory"
    except RecursionError:
        return "", "is nested too deeply"
    except Exception as error:
        return "", f"cannot be compiled: {type(error).__name__}"


if __name__ == "__main__":
    main()
