"""Run one worker: python -m services.worker"""

import sys

from services.worker.main import make
from shared.actor import run_actor

sys.exit(run_actor(make))
