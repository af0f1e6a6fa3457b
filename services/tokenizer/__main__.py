"""Run one tokenizer: python -m services.tokenizer"""

import sys

from services.tokenizer.main import make
from shared.actor import run_actor

sys.exit(run_actor(make))
