"""How requests that are to be delayed are known to the services that delay them."""

from __future__ import annotations

LABEL = "delayed"  # where there is a header
SEED = 1 << 40  # where there is only a seed: this and above
