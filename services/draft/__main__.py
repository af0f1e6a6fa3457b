"""Run one draft: python -m services.draft"""

from services.draft.main import make
from shared.actor import run_actor
from shared.processes.exit_status import leave

leave(run_actor(make))
