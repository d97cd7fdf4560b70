"""``ltui completion``: print the script by which a shell completes commands, presets and runs."""

from __future__ import annotations

import argparse
from argparse import Namespace

import shtab

from ltui.app.commands.parser import build_parser
from ltui.app.exit_codes import EXIT_DONE
from ltui.training.config.preset_discovery import preset_names

# Runs change, so the shell lists their directories itself. Tab does not start Python.
# A run is named by its id, or by the part before the last dash.
_RUNS = (
    '$(cd "${LTUI_HOME:-${XDG_DATA_HOME:-$HOME/.local/share}/ltui}/runs" 2>/dev/null '
    "&& ls | sed 'p;s/-[^-]*$//' | sort -u)"
)
_PREAMBLE = {
    "bash": """
_ltui_runs() { compgen -W "last %(runs)s" -- "$1"; }
_ltui_presets() { compgen -W "%(presets)s" -- "$1"; compgen -f -- "$1"; }
""",
    "zsh": """
_ltui_runs() { compadd last ${(f)"%(runs)s"}; }
_ltui_presets() { compadd %(presets)s; _files; }
""",
}
_COMPLETERS = {
    "runs": {"bash": "_ltui_runs", "zsh": "_ltui_runs"},
    "run": {"bash": "_ltui_runs", "zsh": "_ltui_runs"},
    "preset": {"bash": "_ltui_presets", "zsh": "_ltui_presets"},
    "output": shtab.FILE,
    "check": shtab.FILE,
    "python": shtab.FILE,
}


def print_script(options: Namespace) -> int:
    """Run ``ltui completion bash|zsh|tcsh``."""
    parser = build_parser()
    _set_completers(parser)
    values = {"runs": _RUNS, "presets": " ".join(preset_names())}
    preamble = _PREAMBLE.get(options.shell, "") % values
    print(shtab.complete(parser, shell=options.shell, preamble=preamble))
    return EXIT_DONE


def _set_completers(parser: argparse.ArgumentParser) -> None:
    """Set how each argument is completed."""
    for action in parser._actions:
        if action.dest in _COMPLETERS and action.option_strings != ["--version"]:
            action.complete = _COMPLETERS[action.dest]  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _set_completers(command)
