"""Run one scheduler: python -m services.scheduler"""

import sys

from services.scheduler.main import make
from shared.actor import run_actor

sys.exit(run_actor(make))
