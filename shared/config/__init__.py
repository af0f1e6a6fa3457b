"""Settings: what they are (`settings`, and a module for each section), which values cannot work (`checks`), where they
come from (`sources`)."""

from __future__ import annotations

from shared.config.sections.access import AccessSettings
from shared.config.sections.adapters import AdapterSettings
from shared.config.sections.admission import AdmissionSettings
from shared.config.sections.deployment import DeploymentSettings
from shared.config.sections.engine import EngineSettings
from shared.config.sections.gateway import GatewaySettings
from shared.config.sections.memory import MemorySettings
from shared.config.sections.models import ModelsSettings
from shared.config.sections.observation import ObservationSettings
from shared.config.sections.scheduling import SchedulingSettings
from shared.config.sections.speculation import MAX_DRAFT_TOKENS, SpeculationSettings
from shared.config.served import FurtherModel, check_models, read_models, read_table, settings_of_model, write_models
from shared.config.settings import Settings, places
from shared.config.sources import PREFIX, ConfiguredDeployment, load_configuration, load_settings, settings_environment
