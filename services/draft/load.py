"""Loads a draft model: a second model, with its own memory and threads, in the formats of the deployment.

Only this module and the model's proposer use torch.
"""

from __future__ import annotations

from pathlib import Path

from engine.description.reading import read_config, why_no_draft
from engine.loading.load import load_model
from services.draft.model import ModelProposer
from shared.config import Settings
from shared.errors import ConfigError
from shared.text.model_source import resolve_model_dir


def load_proposer(settings: Settings) -> ModelProposer:
    """Raises ModelError for the checkpoint's faults, ConfigError for the settings'."""
    own = draft_settings(settings)
    if read_config(resolve_model_dir(own.engine.model)).has_states:
        raise ConfigError(why_no_draft(settings.speculation.draft))
    loaded = load_model(own, longest=settings.scheduling.max_model_len)
    return ModelProposer(loaded, name=Path(settings.speculation.draft).name)


def draft_settings(settings: Settings) -> Settings:
    """What the draft's model is loaded with.  Its length is left open: it may be shorter than the target's."""
    return settings.replace(
        model=settings.speculation.draft,
        served_model_name="",
        max_model_len=0,
        num_threads=settings.speculation.draft_num_threads,
        kv_cache_memory=settings.speculation.draft_kv_cache_memory,
        num_blocks=0,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
        enable_eplb=False,
        enable_sequence_parallel=False,
        tensor_parallel_reduce=False,
        enable_dbo=False,
        num_redundant_experts=0,
    )
