"""All settings, by section; each is declared and described in the module of its section.

Users know no sections: in files, variables, options and recordings the names are flat, and `places` finds them.
Help pages and docs/reference/settings.md are made from the descriptions (`scripts/reference`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_type_hints

import msgspec

from shared.config.section import Section
from shared.config.sections.access import AccessSettings
from shared.config.sections.adapters import AdapterSettings
from shared.config.sections.admission import AdmissionSettings
from shared.config.sections.deployment import DeploymentSettings
from shared.config.sections.engine import EngineSettings
from shared.config.sections.events import EventSettings
from shared.config.sections.gateway import GatewaySettings
from shared.config.sections.memory import MemorySettings
from shared.config.sections.models import ModelsSettings
from shared.config.sections.observation import ObservationSettings
from shared.config.sections.scheduling import SchedulingSettings
from shared.config.sections.speculation import SpeculationSettings


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One deployment's settings; names of limits are vLLM's.  Sizes in bytes, times in seconds, lengths in tokens."""

    engine: EngineSettings = EngineSettings()
    memory: MemorySettings = MemorySettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    adapters: AdapterSettings = AdapterSettings()
    gateway: GatewaySettings = GatewaySettings()
    access: AccessSettings = AccessSettings()
    admission: AdmissionSettings = AdmissionSettings()
    deployment: DeploymentSettings = DeploymentSettings()
    observation: ObservationSettings = ObservationSettings()
    models: ModelsSettings = ModelsSettings()
    events: EventSettings = EventSettings()

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """From flat names.  Raises KeyError for unknown names, msgspec.ValidationError for a value of a wrong type."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            parts.setdefault(places()[name], {})[name] = value
        made: Any = {name: msgspec.convert(part, sections()[name], strict=False) for name, part in parts.items()}
        return cls(**made)

    def replace(self, **changes: Any) -> Settings:
        """These settings with others of these flat names."""
        return Settings.of(**self.flat() | changes)

    def flat(self) -> dict[str, Any]:
        return {name: getattr(getattr(self, section), name) for name, section in places().items()}


@cache
def sections() -> dict[str, type[Section]]:
    return get_type_hints(Settings)


@cache
def places() -> dict[str, str]:
    """The name of each setting, in the order of the declarations -> the name of its section."""
    return {field: name for name, section in sections().items() for field in section.__struct_fields__}
