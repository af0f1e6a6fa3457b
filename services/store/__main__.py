"""Run one store: python -m services.store"""

import sys

from services.store.main import make
from shared.actor import run_actor

sys.exit(run_actor(make))
