"""Assembles a draft.  Only a draft model loads torch: prompt lookup starts at once and stays small."""

from __future__ import annotations

import asyncio
from functools import partial

from services.draft.actor import DraftActor
from services.draft.ngram import NGramProposer
from services.draft.proposer import Proposer
from services.draft.session import DraftSession
from shared.actor.executor import Executor, PacedExecutor, ThreadExecutor
from shared.config import Settings
from shared.messages import DraftUpdate, Tick
from shared.transport import Transport


def make(transport: Transport, settings: Settings) -> DraftActor:
    """One draft.  Where the setting `draft` is off, or a head that workers run, it joins and proposes nothing."""
    if not settings.speculation.has_service:
        return DraftActor(transport, settings, None, _paced)
    if settings.speculation.draft == "ngram":
        return DraftActor(transport, settings, partial(_make_lookup, settings), _paced)
    loop = asyncio.get_running_loop()

    def load() -> Proposer:
        from services.draft.load import load_proposer

        return load_proposer(settings)

    def in_thread(proposer: Proposer, transport: Transport) -> Executor[DraftUpdate]:
        def wake() -> None:
            loop.call_soon_threadsafe(actor.post, Tick())

        return ThreadExecutor(DraftSession(proposer), transport, name="drafting", on_failure=wake)

    actor = DraftActor(transport, settings, load, in_thread)
    return actor


def _paced(proposer: Proposer, transport: Transport) -> Executor[DraftUpdate]:
    return PacedExecutor(DraftSession(proposer), transport)


def _make_lookup(settings: Settings) -> Proposer:
    return NGramProposer(
        num_rows=settings.scheduling.max_num_seqs,
        max_model_len=settings.scheduling.max_model_len,
        shortest=settings.speculation.prompt_lookup_min,
        longest=settings.speculation.prompt_lookup_max,
    )
