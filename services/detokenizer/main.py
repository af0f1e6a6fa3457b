"""Assembles a detokenizer."""

from __future__ import annotations

from services.detokenizer.actor import DetokenizerActor
from services.detokenizer.decoder import DecoderFactory
from shared.config import Settings
from shared.processes.heap import trim_heap
from shared.text.model_source import resolve_model_dir
from shared.text.text_digest import text_fingerprint
from shared.text.tokenization import load_tokenizer
from shared.transport import Transport


def make(transport: Transport, settings: Settings) -> DetokenizerActor:
    """One detokenizer of the configured model.  Raises ModelError where it has no usable tokenizer."""
    directory = resolve_model_dir(settings.engine.model)
    decoders = DecoderFactory(load_tokenizer(directory))
    actor = DetokenizerActor(transport, settings, decoders, text=text_fingerprint(directory))
    trim_heap()  # what reading the vocabulary took, as much as it takes itself
    return actor
