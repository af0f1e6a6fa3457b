"""A process around one engine: loads it, then runs what it is told over a pipe, one JSON line for each.

    python -P host.py ENGINE_FILE OPTIONS_AS_JSON

Runs in a peer's own environment too, so it knows nothing but the standard library.  What the engine prints goes to
standard error; standard output belongs to the answers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO


class Engine(Protocol):
    """What an engine's file gives.  It may also have

    - `prepare(num_seqs, num_tokens)`: be ready for so many requests at once, each of at most so many tokens, prompt and
      output;
    - `use_adapters(count)`: from now on requests take turns with so many adapters, 0: have none;
    - `report()`: what else is worth telling at the end, such as memory;
    - `close()`.
    """

    version: str

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """Generate for all at once.  `num_tokens`: how many each got; `first`: seconds to the first token, if known."""


def load_engine(file: str, options: dict[str, Any]) -> Engine:
    """By path: the file may have the name of the package that it drives."""
    spec = importlib.util.spec_from_file_location(f"engine_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    engine: Engine = module.load(options)
    return engine


def obey(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    """One order's answer."""
    if order["order"] == "prepare":
        _optional(engine, "prepare", order["num_seqs"], order["num_tokens"])
        return {}
    if order["order"] == "adapters":
        _optional(engine, "use_adapters", order["count"])
        return {}
    if order["order"] == "report":
        return _optional(engine, "report") or {}
    requests = [(prompt, count) for prompt, count in order["requests"]]
    begin = time.perf_counter()
    answer = engine.run(requests)
    return {"seconds": time.perf_counter() - begin, **answer}


def _optional(engine: Engine, name: str, *arguments: int) -> dict[str, Any] | None:
    method: Callable[..., dict[str, Any] | None] | None = getattr(engine, name, None)
    return method(*arguments) if method else None


def private_output() -> TextIO:
    """Standard output for us alone; what others print to it goes to standard error from now on."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def main() -> None:
    answers = private_output()

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    begin = time.perf_counter()
    engine = load_engine(sys.argv[1], json.loads(sys.argv[2]))
    say({"version": engine.version, "load_seconds": time.perf_counter() - begin})
    for line in sys.stdin:
        try:
            say(obey(engine, json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise
    _optional(engine, "close")


if __name__ == "__main__":
    main()
