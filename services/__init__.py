"""One folder, one process."""

import sys

# structlog takes rich, where that is installed, for tracebacks in colours, which no service prints: it would be half of
# what structlog adds to the start of each.  Here, because this module comes before all that import structlog.
if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
