"""Assembles a tokenizer."""

from __future__ import annotations

from services.tokenizer.actor import TokenizerActor
from services.tokenizer.confined.renderers import RendererPool
from shared.config import Settings
from shared.processes.heap import trim_heap
from shared.text.model_source import resolve_model_dir
from shared.text.text_digest import text_fingerprint
from shared.text.tokenization import load_tokenizer
from shared.transport import Transport


def make(transport: Transport, settings: Settings) -> TokenizerActor:
    """One tokenizer of the configured model.  Raises ModelError where it has none that can be used."""
    directory = resolve_model_dir(settings.engine.model)
    tokenizer = load_tokenizer(directory, settings.gateway.chat_template)
    renderers = None
    if tokenizer.chat_template is not None:
        renderers = RendererPool(
            tokenizer.chat_template,
            tokenizer.special_tokens,
            tool_template=tokenizer.tool_template,
            timeout=settings.gateway.template_timeout,
            max_output_bytes=settings.gateway.max_prompt_bytes,
        )
    actor = TokenizerActor(transport, settings, tokenizer, renderers, text=text_fingerprint(directory))
    trim_heap()  # what reading the vocabulary took, as much as it takes itself
    return actor
