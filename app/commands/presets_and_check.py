"""``ltui presets`` and ``ltui check``: list the presets, and check a configuration."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path

from ltui.app.command_output import EXIT_DONE, print_envelope
from ltui.app.launch.build_spec import prepare_launch
from ltui.app.launch.local_machine import freeze_warnings, print_warnings
from ltui.app.launch.run_in_interpreter import check_with_classes
from ltui.app.presentation.run_report import columns
from ltui.training.config.preset_discovery import preset_names
from ltui.training.config.presets import Preset, load_preset
from ltui.training.json_codec import to_json
from ltui.training.problem import ProblemError
from ltui.widgets.sanitise import clean_line, clean_name

_SHOWN = ("name", "title", "about", "tags", "knobs")
DATA = {"list_all": [(Preset, {"path": str | None}, _SHOWN)]}


def list_all(options: Namespace) -> int:
    """Run ``ltui presets``."""
    presets: list[Preset] = []
    for name in preset_names():
        try:
            presets.append(load_preset(name, Path.cwd()))
        except ProblemError as error:
            # One damaged preset must not hide the others.
            sys.stderr.write(f"{error}\n")
    if options.json:
        print_envelope([_to_document(preset) for preset in presets])
    else:
        rows = [
            (clean_name(p.name), clean_name(", ".join(p.tags)), clean_line(p.title))
            for p in presets
        ]
        print("\n".join(columns(rows)))
    return EXIT_DONE


def _to_document(preset: Preset) -> dict[str, object]:
    shown = to_json(preset)
    path = None if preset.path is None else str(preset.path)
    return {**{key: shown.get(key) for key in _SHOWN}, "path": path}


def check(options: Namespace) -> int:
    """Run ``ltui check PRESET|FILE``."""
    request = prepare_launch(options.preset, options.overrides, options.python)
    name = clean_name(request.preset.name)
    if options.quick:
        print_warnings(freeze_warnings(request.spec("check", "check", time.time())))
        print(f"{name}: OK so far. The model and data classes were not loaded (--quick).")
        return EXIT_DONE
    warnings = check_with_classes(request)
    print_warnings([*freeze_warnings(request.spec("check", "check", time.time())), *warnings])
    print(f"{name}: OK. The configuration loads in {request.python}.")
    return EXIT_DONE
