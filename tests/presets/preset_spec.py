"""The run specification of a preset, as a launch builds it, for tests that start no ltui."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ltui.training.config.device_selection import Machine
from ltui.training.config.presets import Preset, build_spec, load_preset
from ltui.training.config.run_spec import RunSpec


def preset_spec(preset: Preset | str, machine: Machine, overrides: Sequence[str] = ()) -> RunSpec:
    """Return the specification of a run of ``preset`` with ``overrides`` on ``machine``.

    ``preset``: also the name of a shipped preset or the path of a file. ``overrides``:
    ``KEY=VALUE`` each, as for ``--set``. Id, name, folder and time of the run are placeholders.
    Raise ``ProblemError`` if ltui would refuse to start the run.
    """
    return build_spec(
        load_preset(preset) if isinstance(preset, str) else preset,
        overrides,
        id="i",
        name="n",
        cwd="/",
        python=sys.executable,
        created_at=0,
        machine=machine,
    )
