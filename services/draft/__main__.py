"""Run one draft: python -m services.draft"""

import sys

from services.draft.main import make
from shared.actor import run_actor

sys.exit(run_actor(make))
