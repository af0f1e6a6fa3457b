"""Assembles a draft.  Only a draft model loads torch: prompt lookup starts at once and stays small."""

from __future__ import annotations

import asyncio
from functools import partial

from services.draft.actor import DraftActor
from services.draft.executor import Executor, InlineExecutor, ThreadExecutor
from services.draft.ngram import NGramProposer
from services.draft.proposer import Proposer
from shared.config import SchedulingSettings, Settings, SpeculationSettings
from shared.messages import Tick
from shared.transport import Transport


def make(transport: Transport, settings: Settings) -> DraftActor:
    """One draft: `draft` says which; one that is off is a member of the troupe and nothing else."""
    if settings.speculation.draft == "off":
        return DraftActor(transport, settings, None, InlineExecutor)
    if settings.speculation.draft == "ngram":
        lookup = partial(_make_lookup, settings.scheduling, settings.speculation)
        return DraftActor(transport, settings, lookup, InlineExecutor)
    loop = asyncio.get_running_loop()

    def thread_executor(proposer: Proposer, transport: Transport) -> Executor:
        def wake() -> None:
            loop.call_soon_threadsafe(actor.post, Tick())

        return ThreadExecutor(proposer, transport, on_failure=wake)

    actor = DraftActor(transport, settings, lambda: _load_model(settings), thread_executor)
    return actor


def _make_lookup(scheduling: SchedulingSettings, speculation: SpeculationSettings) -> Proposer:
    return NGramProposer(
        num_rows=scheduling.max_num_seqs,
        max_model_len=scheduling.max_model_len,
        shortest=speculation.prompt_lookup_min,
        longest=speculation.prompt_lookup_max,
    )


def _load_model(settings: Settings) -> Proposer:
    from services.draft.load import load_proposer

    return load_proposer(settings)
