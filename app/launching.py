"""From home's form to a run: checked where it would train, then launched. Blocks; for threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ltui.app.prepare import prepare_preset
from ltui.training.run.presets import Preset
from ltui.training.store.home import RunDir, new_run_id
from ltui.training.supervise.launch import launch


def start_run(home: Path, preset: Preset, overrides: Sequence[str], python: str | None) -> RunDir:
    """The run, once its supervisor answers. ``ProblemError``: there is none."""
    asked = prepare_preset(preset, overrides, python)
    run_id, name = new_run_id(home, None)
    return launch(asked.spec(run_id, name, time.time()), home)
