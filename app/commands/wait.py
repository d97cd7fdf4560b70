"""``ltui wait`` and ``ltui events``: wait for runs, and print what happened in one."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

from ltui.app.actions import wait_for_runs
from ltui.app.command_output import EXIT_DONE, print_envelope
from ltui.training.json_codec import to_json
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.training.store.history_reader import StoredEvent


def wait(options: Namespace) -> int:
    """Run ``ltui wait RUN...``, and return the exit code of the reason."""
    result = wait_for_runs.wait(
        options.runs,
        options.until or ("ended",),
        for_at_most_s=options.for_at_most,
        any_run=options.any,
        notice=lambda text: print(text, file=sys.stderr),
    )
    if not options.json:
        print("\n".join(f"{run.id}: {run.sentence}" for run in result.runs))
        return result.exit_code
    documents: list[dict[str, Any]] = []
    following: list[str] = []
    for run in result.runs:
        document = {"id": run.id, "reason": run.reason, "sentence": run.sentence}
        documents.append(document | {name: getattr(run.snapshot, name, None) for name in _SHOWN})
        if run.snapshot is not None:
            following += wait_for_runs.next_commands(run.snapshot, run.reason)
    data = {"exit_code": result.exit_code, "waited_s": result.waited_s, "runs": documents}
    print_envelope(data, following)
    return result.exit_code


_SHOWN = ("state", "detail", "attempt", "global_step", "epoch", "metrics")
"""Fields of the snapshot in the JSON of a wait; null if the run cannot be read."""
_RUN = (RunSnapshot, {"id": str, "reason": str, "sentence": str}, _SHOWN)
_EVENT = (StoredEvent, {"cursor": int}, ("attempt", "rank", "t", "kind", "text", "data"))
DATA = {"wait": {"exit_code": int, "waited_s": float, "runs": [_RUN]}, "events": _EVENT}


def events(options: Namespace) -> int:
    """Run ``ltui events RUN``: one JSON line for each event after ``--since``."""
    for event in wait_for_runs.events(options.run, options.since or 0, follow=options.follow):
        document = to_json(event)
        document["cursor"] = document.pop("id")
        print(json.dumps(document, allow_nan=False), flush=True)
    return EXIT_DONE
