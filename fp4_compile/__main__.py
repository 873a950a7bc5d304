"""``python -m fp4_compile``."""

from __future__ import annotations

import sys

from fp4_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
