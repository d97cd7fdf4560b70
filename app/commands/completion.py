"""``ltui completion``: print the script by which a shell completes what one types."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import shtab

from ltui.app.command_line.launch_arguments import COMPLETED_NAMES
from ltui.app.command_line.parser import build_parser
from ltui.app.command_output import EXIT_DONE
from ltui.training.config.preset_discovery import preset_names
from ltui.training.config.presets import load_preset
from ltui.training.problem import ProblemError
from ltui.training.store.find_run import find_run
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import ltui_home

# Runs change, so the shell lists their directories itself, without starting Python.
# A run is named by its id, or by the part before the last dash.
_RUNS = (
    'cd "${LTUI_HOME:-${XDG_DATA_HOME:-$HOME/.local/share}/ltui}/runs" 2>/dev/null '
    "&& ls | sed 'p;s/-[^-]*$//' | sort -u"
)
# Names come from directories and histories that others may have made, and a shell runs what some of
# them contain. So bash offers only names of harmless characters, without `compgen -W`, which
# expands its words. zsh and fish quote what they insert.
_PREAMBLE = {
    "bash": """
_ltui_words() {
  local word
  while IFS= read -r word; do
    [[ $word == "$1"* && $word != *[!A-Za-z0-9_./:@%%+=,-]* ]] && printf '%%s\\n' "$word"
  done
}
_ltui_runs() { { echo last; %(runs)s; } | _ltui_words "$1"; }
_ltui_presets() { printf '%%s\\n' %(presets)s | _ltui_words "$1"; compgen -f -- "$1"; }
_ltui_names() { ltui completion "$1" -- "${COMP_WORDS[@]:2}" 2>/dev/null | _ltui_words "$2"; }
_ltui_metrics() { _ltui_names metrics "$1"; }
_ltui_keys() { compopt -o nospace 2>/dev/null; _ltui_names keys "$1"; }
""",
    "zsh": """
_ltui_runs() { compadd -- last ${(f)"$(%(runs)s)"}; }
_ltui_presets() { compadd %(presets)s; _files; }
_ltui_metrics() { compadd -- ${(f)"$(ltui completion metrics -- $words 2>/dev/null)"}; }
_ltui_keys() { compadd -S '' -- ${(f)"$(ltui completion keys -- $words 2>/dev/null)"}; }
""",
    "fish": """
function _ltui_runs; echo last; sh -c '%(quoted_runs)s'; end
function _ltui_presets; string split ' ' '%(presets)s'; __fish_complete_path (commandline -ct); end
function _ltui_metrics; ltui completion metrics -- (commandline -opc) 2>/dev/null; end
function _ltui_keys; ltui completion keys -- (commandline -opc) 2>/dev/null; end
""",
}


def _in_shells(function: str) -> dict[str, str]:
    return {"bash": function, "zsh": function, "fish": f"({function})"}


_COMPLETERS = {
    "runs": _in_shells("_ltui_runs"),
    "run": _in_shells("_ltui_runs"),
    "preset": _in_shells("_ltui_presets"),
    "metric": _in_shells("_ltui_metrics"),
    "overrides": _in_shells("_ltui_keys"),
    "output": shtab.FILE,
    "check": shtab.FILE,
    "python": shtab.FILE,
}


def print_script(options: Namespace) -> int:
    """Run ``ltui completion SHELL``, or print names for such a script."""
    if options.what in COMPLETED_NAMES:
        print(*sorted(set(_names(options.what, options.words))), sep="\n")
        return EXIT_DONE
    parser = build_parser()
    _set_completers(parser)
    quoted_runs = _RUNS.replace("'", "'\\''")
    values = {"runs": _RUNS, "quoted_runs": quoted_runs, "presets": " ".join(preset_names())}
    preamble = _PREAMBLE.get(options.what, "") % values
    print(shtab.complete(parser, shell=options.what, preamble=preamble))
    return EXIT_DONE


def _names(what: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the metrics or the keys of what the words of a command line name; other words do not
    matter."""
    home = ltui_home(to_write=False)
    for word in words:
        with suppress(ProblemError, OSError):
            if what == "keys":
                preset = word if word in preset_names() else find_run(home, word).read_spec().preset
                yield from (f"{key}=" for key in load_preset(preset or word, Path.cwd()).lines)
            else:
                with RunStore(find_run(home, word)) as store:
                    yield from store.metric_names()


def _set_completers(parser: argparse.ArgumentParser) -> None:
    """Set how each argument is completed."""
    for action in parser._actions:
        if action.dest in _COMPLETERS and action.option_strings != ["--version"]:
            action.complete = _COMPLETERS[action.dest]  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _set_completers(command)
