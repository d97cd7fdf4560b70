"""``python -m tests.bench.frequent_dashboard RUN``: the dashboard with four frames a second.

Otherwise the dashboard shows fewer frames if they cost much, and its cost would say nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ltui.app.live.run_poller import FASTEST_S, FramePacer
from ltui.app.textual_app import LtuiApp
from ltui.training.store.run_directory import RunDir

if __name__ == "__main__":
    FramePacer.period_s = lambda *_: FASTEST_S  # type: ignore[method-assign]
    run_dir = RunDir(Path(sys.argv[1]))
    LtuiApp(run_dir.home, run=run_dir).run()
