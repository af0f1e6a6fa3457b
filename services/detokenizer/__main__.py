"""Run one detokenizer: python -m services.detokenizer"""

import sys

from services.detokenizer.main import make
from shared.actor import run_actor

sys.exit(run_actor(make))
