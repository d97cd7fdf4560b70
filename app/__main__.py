"""``python -m ltui.app`` is the command ``ltui``."""

from __future__ import annotations

import sys

from ltui.app.cli import main

sys.exit(main())
