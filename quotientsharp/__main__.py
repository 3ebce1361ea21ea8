"""Run as ``python -m quotientsharp``."""

import sys

from .cli import main

sys.exit(main())
