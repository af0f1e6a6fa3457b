"""Settings: what they are (`settings`, and a module for each section), which values cannot work (`checks`), where they
come from (`sources`)."""

from __future__ import annotations

from shared.config.access import AccessSettings
from shared.config.adapters import AdapterSettings
from shared.config.admission import AdmissionSettings
from shared.config.deployment import DeploymentSettings
from shared.config.engine import EngineSettings
from shared.config.gateway import GatewaySettings
from shared.config.memory import MemorySettings
from shared.config.models import ModelsSettings
from shared.config.observation import ObservationSettings
from shared.config.scheduling import SchedulingSettings
from shared.config.served import FurtherModel, check_models, read_models, read_table, settings_of_model, write_models
from shared.config.settings import Settings, places
from shared.config.sources import PREFIX, ConfiguredDeployment, load_configuration, load_settings, settings_environment
from shared.config.speculation import MAX_DRAFT_TOKENS, SpeculationSettings
