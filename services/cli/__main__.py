from __future__ import annotations

from services.cli.main import main

main()
