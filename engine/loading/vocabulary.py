"""The model's vocabulary as grammars walk it.

To read it takes 0.1 to 1 s of a core, in which the library holds Python's lock: at the first request with a grammar all
streams of the worker would wait for it.  So it is read while the model loads, which needs the lock little.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from shared.automata.limits import GrammarError
from shared.automata.vocabulary import Vocabulary, load_vocabulary
from shared.errors import ModelError
from shared.text.tokenization import ModelTokenizer, load_tokenizer

log = structlog.get_logger()


class GrammarVocabulary:
    """Called with the tokens that end a sequence, from any thread."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory = directory
        self._size = size
        self._lock = threading.Lock()
        self._found: Vocabulary | None = None

    def prepare(self) -> None:
        """Begin to read it, for the ends that the checkpoint names; the process's end does not wait for that."""
        threading.Thread(target=self._read_own, name="vocabulary", daemon=True).start()

    def __call__(self, eos_token_ids: Sequence[int], tokenizer: ModelTokenizer | None = None) -> Vocabulary:
        """Raises GrammarError where the tokenizer is not one that can be walked."""
        with self._lock:
            if self._found is None or self._found.eos_token_ids != tuple(eos_token_ids):
                self._found = load_vocabulary(self._directory, self._size, eos_token_ids, tokenizer)
            return self._found

    def _read_own(self) -> None:
        try:
            tokenizer = load_tokenizer(self._directory)
            self(tokenizer.defaults.eos_token_ids, tokenizer)
        except (GrammarError, ModelError) as error:  # a request with a grammar is refused for it
            log.info("no_grammars", reason=str(error))
