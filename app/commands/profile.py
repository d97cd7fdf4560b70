"""``ltui profile``: profile some steps of a live run, and print what takes the time."""

from __future__ import annotations

import sys
from argparse import Namespace

from ltui.app.actions.profile_run import begin, follow, last_profile
from ltui.app.command_output import EXIT_DONE, EXIT_FAILED, print_envelope
from ltui.app.presentation.profile_text import profile_lines
from ltui.training.diagnosis.profile_summary import Profile, ProfileState
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import ltui_home
from ltui.widgets.sanitise import clean_line

DATA = {"profile": Profile}


def profile(options: Namespace) -> int:
    """Run ``ltui profile RUN``."""
    if options.show:
        result = last_profile(options.run)
    else:
        run_dir = find_run(ltui_home(), options.run)
        wish = {"ranks": options.ranks, "steps": options.steps, "memory": options.memory}
        result = follow(run_dir, begin(run_dir, **wish), _show_progress)
    if options.json:
        print_envelope(result, [])
    else:
        print("\n".join(profile_lines(result)))
    return EXIT_FAILED if result.state is ProfileState.FAILED else EXIT_DONE


def _show_progress(profile: Profile) -> None:
    if not profile.is_over:
        print(clean_line(profile.progress, 200), file=sys.stderr, flush=True)
