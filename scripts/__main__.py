"""Runs the `main` of a module, for the executables beside this file: python -m scripts MODULE [options]"""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module(sys.argv.pop(1)).main())
