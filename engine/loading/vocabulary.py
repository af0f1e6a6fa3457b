"""The model's vocabulary as grammars walk it.

To read it takes 0.1 to 1 s of a core, in which the library holds Python's lock: at the first request with a grammar all
streams of the worker would wait for it.  So it is read before, once no step computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from engine.modeling.pool_backing import IdleTime
from shared.automata.limits import GrammarError
from shared.automata.vocabulary import Vocabulary, load_vocabulary
from shared.errors import ModelError
from shared.text.tokenization import load_tokenizer

log = structlog.get_logger()


class GrammarVocabulary:
    """Called with the tokens that end a sequence, from any thread."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory = directory
        self._size = size
        self._lock = threading.Lock()
        self._found: Vocabulary | None = None

    def prepare(self, idle: IdleTime) -> None:
        """Read it in idle time, for the ends that the checkpoint names; the process's end does not wait for that."""
        threading.Thread(target=self._read_own, args=(idle,), name="vocabulary", daemon=True).start()

    def __call__(self, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Raises GrammarError where the tokenizer is not one that can be walked."""
        with self._lock:
            if self._found is None or self._found.eos_token_ids != tuple(eos_token_ids):
                self._found = load_vocabulary(self._directory, self._size, eos_token_ids)
            return self._found

    def _read_own(self, idle: IdleTime) -> None:
        idle.wait()
        if self._found is not None:
            return
        try:
            self(load_tokenizer(self._directory).defaults.eos_token_ids)
        except (GrammarError, ModelError) as error:  # a request with a grammar is refused for it
            log.info("no_grammars", reason=str(error))
