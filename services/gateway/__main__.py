from __future__ import annotations

from services.gateway.main import main

raise SystemExit(main())
