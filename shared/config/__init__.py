"""Settings: what they are (`settings`), which values cannot work (`checks`), where they come from (`sources`)."""

from __future__ import annotations

from shared.config.settings import MAX_DRAFT_TOKENS, Settings
from shared.config.sources import PREFIX, load_settings, settings_environment

__all__ = ["MAX_DRAFT_TOKENS", "PREFIX", "Settings", "load_settings", "settings_environment"]
