"""``ltui diagnose``: find out which rank stalls, where, why and what to do, or why a run ended."""

from __future__ import annotations

import shutil
import sys
import time
from argparse import Namespace

from ltui.app.actions import run_queries
from ltui.app.actions.wait_for_runs import next_commands
from ltui.app.command_output import EXIT_DONE, output, print_envelope, refuse_existing
from ltui.app.diagnosis.diagnosis_view import DiagnosisContext, diagnosis_view_model
from ltui.app.diagnosis.request_diagnosis import DiagnosisResult
from ltui.training.diagnosis.evidence import Diagnosis
from ltui.training.json_codec import to_json
from ltui.training.shared.defaults import SAMPLE_S
from ltui.training.state.run_snapshot import Limit, RunState
from ltui.widgets.diagnosis_lines import WIDTH, report
from ltui.widgets.sanitise import clean_line

NARROWEST, WIDEST = 60, 140
"""Least and most columns of a report on a terminal."""

DATA = {"diagnose": (Diagnosis, {"state": RunState, "detail": str | None, "limit": Limit | None})}


def diagnose(options: Namespace) -> int:
    """Run ``ltui diagnose RUN``."""
    refuse_existing(options.output, force=options.force)
    if options.sample and sys.stderr.isatty():
        print(f"sampling the stacks of two ranks for {SAMPLE_S:.0f} s ...", file=sys.stderr)
    result = run_queries.diagnose(options.run, sample=options.sample)
    with output(options.output) as stream:
        if options.json:
            print_envelope(to_document(result), next_commands(result.snapshot), stream=stream)
        else:
            stream.write(report_text(result, time.time(), to_file=stream is not sys.stdout))
    if options.output not in (None, "-"):
        print(f"{options.output}: {clean_line(result.diagnosis.headline)}")
    return EXIT_DONE


def to_document(result: DiagnosisResult) -> dict[str, object]:
    """Return the diagnosis as JSON values, with the state of the run."""
    return {
        **result.diagnosis.to_document(),
        "state": result.snapshot.state.value,
        "detail": result.snapshot.detail,
        "limit": to_json(result.snapshot.limit),
    }


def report_text(result: DiagnosisResult, now: float, *, to_file: bool) -> str:
    """Return the report, as wide as the terminal. In a file, which is for other people, paths
    are complete."""
    context = DiagnosisContext(
        snapshot=result.snapshot, now=now, earlier=result.earlier, full_paths=to_file
    )
    width = WIDTH
    if not to_file and sys.stdout.isatty():
        width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))
    return report(diagnosis_view_model(result.diagnosis, context), width)
