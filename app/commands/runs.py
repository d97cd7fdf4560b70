"""``ltui runs`` and ``show``: list runs, show one."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from ltui.app.actions.run_queries import select_runs
from ltui.app.command_output import EXIT_DONE, OneOf, print_envelope, print_envelope_of_list
from ltui.app.runs.run_entry import RunEntry, run_document
from ltui.app.runs.run_fields import FIELDS, Kind, kind_of, value_of, value_text
from ltui.app.runs.run_list import RunList, read_settings, recovered_snapshot
from ltui.training.json_codec import to_json
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import HEAD_FIELDS, Limit, LimitKind, RunSnapshot
from ltui.training.state.time_advice import Advice
from ltui.training.state.time_ledger import TimeLedger
from ltui.training.store.code_record import CodeRecord
from ltui.training.store.find_run import find_run
from ltui.training.store.frozen_code import (
    FrozenCode,
    changed_files,
    difference,
    differs_text,
    frozen_code_of,
)
from ltui.training.store.labels_file import read_labels
from ltui.training.store.run_directory import RunDir, ltui_home
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_line, clean_name

REASON_CELLS = 80
"""Columns of a reason."""
CELLS = 60
"""Maximum columns of a field that was chosen with ``--columns``."""
_WORDS = {"state_word": str, "tags": list[str], "group": str, "note": str, "star": bool}
_LABELS = {**_WORDS, "name?": str, "colour?": int}
_LISTED = (RunSnapshot, {**_LABELS, "state": str}, HEAD_FIELDS)
_SHOWN = (RunSnapshot, {**_LABELS, "settings": dict[str, str]})
_TIME = (TimeLedger, {"advice": [Advice], "limit": Limit | None})
_CODE_DIFF = {"attempt": int, "changed_files": list[str], "diff": str}
DATA = {
    "list_all": OneOf(([_LISTED], list[dict[str, Any]])),
    "show": OneOf((_SHOWN, [(CodeRecord, {"diff": str})], _CODE_DIFF, _TIME)),
}


def list_all(options: Namespace) -> int:
    """Run ``ltui runs``."""
    now = time.time()
    chosen = [name.strip() for name in (options.columns or "").split(",") if name.strip()]
    with closing(RunList(ltui_home(to_write=False))) as runs:
        selected = select_runs(runs, options.filter or "", options.sort, chosen)
        shown = selected.runs
        for sentence in selected.notes:
            sys.stderr.write(f"Note: {sentence}\n")
        if options.json:
            print_envelope_of_list([_json(runs, entry, chosen) for entry in shown])
            return EXIT_DONE
    if not selected.total:
        print("No runs yet. Start one with: ltui run quickstart")
    elif not shown:
        print(f"None of {selected.total} runs matches the filter.")
    else:
        print("\n".join(_chosen_lines(shown, chosen, now) if chosen else runs_lines(shown, now)))
    return EXIT_DONE


def runs_lines(entries: Sequence[RunEntry], now: float) -> list[str]:
    """Return a table with a line for each run."""
    # Imported here, as below: JSON needs none of it.
    from ltui.app.presentation.run_report import columns, started_text, truncated

    labelled = any(entry.labels.tags or entry.labels.star for entry in entries)
    named = any(entry.labels.name for entry in entries)
    reasons = any(_reason(entry) for entry in entries)
    head = ("ID", *(["NAME"] if named else []), "WHAT", "STATE", "PROGRESS", "STARTED")
    rows = [[*head, *(["TAGS"] if labelled else []), "REASON" if reasons else ""]]
    for entry in entries:
        run = entry.summary
        if run is None:
            facts = [NA, entry.state, NA, NA]
        else:
            started = started_text(run.created_at, run.started_at, run.attempt, now)
            facts = [truncated(run.program, 30) or NA, run.state, run.position or NA, started]
        star = ["★"] if entry.labels.star else []
        tags = truncated(" ".join([*star, *entry.labels.tags]), 30)
        rows.append(
            [
                clean_name(entry.id),
                *([truncated(entry.name, 30)] if named else []),
                *facts,
                *([tags] if labelled else []),
                truncated(_reason(entry), REASON_CELLS),
            ]
        )
    return columns(rows)


def _reason(entry: RunEntry) -> str:
    return entry.problem or "" if entry.summary is None else entry.summary.reason


def _chosen_lines(entries: Sequence[RunEntry], names: Sequence[str], now: float) -> list[str]:
    from ltui.app.presentation.run_report import columns, truncated

    rows = [["ID", *(clean_name(name) for name in names)]]
    rows += [
        [
            clean_name(entry.id),
            *(truncated(clean_line(value_text(entry, n, now)), CELLS) or NA for n in names),
        ]
        for entry in entries
    ]
    right = frozenset(
        place
        for place, name in enumerate(names, start=1)
        if kind_of(name) not in (Kind.TEXT, Kind.SETTING, Kind.FLAG)
    )
    return columns(rows, right)


def _json(runs: RunList, entry: RunEntry, chosen: Sequence[str]) -> str:
    """Return a run as JSON: with ``--columns`` its id and these fields, else its head."""
    if not chosen:
        labels = entry.labels.to_document()
        labels.pop("name", None)  # The head has it.
        # Parsing thousands of heads to print them again would take most of the time.
        return f"{runs.head(entry)[:-1]}, {json.dumps(labels)[1:]}"
    values = {name: to_json(value_of(entry, name)) for name in chosen}
    flags = {n: bool(values[n]) for n in values.keys() & FIELDS if kind_of(n) is Kind.FLAG}
    return json.dumps({"id": entry.id, **values, **flags}, allow_nan=False)


def show(options: Namespace) -> int:
    """Run ``ltui show RUN``."""
    run_dir = find_run(ltui_home(to_write=False), options.run)
    if options.code:
        return _show_code(run_dir, as_json=options.json)
    frozen = frozen_code_of(run_dir)
    if options.code_diff:
        return _show_code_diff(run_dir, frozen, as_json=options.json)
    snapshot = recovered_snapshot(run_dir)
    if options.time:
        return _show_time(run_dir, snapshot, as_json=options.json)
    labels, settings = read_labels(run_dir), read_settings(run_dir)
    if options.json:
        # Imported here: a list of runs needs none of it.
        from ltui.app.actions.wait_for_runs import next_commands

        document = {**run_document(snapshot), **labels.to_document(), "settings": settings}
        print_envelope(document, next_commands(snapshot))
    else:
        from ltui.app.presentation.run_report import show_lines

        lines = show_lines(snapshot, time.time(), labels, settings)
        if frozen is not None:
            # Imported here: other commands do not need it.
            from ltui.app.presentation.run_configuration import frozen_lines

            code = frozen_lines(frozen, changed_files(run_dir, frozen))
            lines += ["", "code", *(f"  {line}" for line in code)]
        print("\n".join(lines))
    return EXIT_DONE


def _show_time(run_dir: RunDir, snapshot: RunSnapshot, *, as_json: bool) -> int:
    """Print where the time of a run went."""
    # Imported here: other commands do not need it.
    from ltui.app.live.run_time import read_time
    from ltui.app.presentation.snapshot_text import title
    from ltui.app.presentation.time_view import time_lines
    from ltui.app.state_words import limit_sentence

    time_of_run = read_time(run_dir, snapshot, in_detail=True)
    if as_json:
        found = [to_json(one) for one in time_of_run.advice]
        limit = to_json(snapshot.limit)
        print_envelope({**to_json(time_of_run.ledger), "advice": found, "limit": limit})
    else:
        computes = snapshot.limit is not None and snapshot.limit.kind == LimitKind.DEVICE
        limit = "" if computes else limit_sentence(snapshot)
        lines = time_lines(time_of_run.ledger, title(snapshot), time_of_run.advice, limit)
        print("\n".join(lines))
    return EXIT_DONE


def _show_code_diff(run_dir: RunDir, frozen: FrozenCode | None, *, as_json: bool) -> int:
    """Print how the code of now differs from the frozen code of a run."""
    if frozen is None:
        raise ProblemError.of(
            where=run_dir.id,
            what="it has no frozen code.",
            remedy="ltui show --code prints what was recorded of its code.",
        )
    changed = changed_files(run_dir, frozen)
    diff = [line for name in changed for line in difference(run_dir, frozen, name)]
    if as_json:
        text = "\n".join(diff)
        print_envelope({"attempt": frozen.number, "changed_files": changed, "diff": text})
    else:
        shown = (clean_line(line.replace("\t", "    "), 2000) for line in diff)
        print("\n".join([f"{differs_text(frozen.number, len(changed))}.", *shown]))
    return EXIT_DONE


def _show_code(run_dir: RunDir, *, as_json: bool) -> int:
    """Print what code the last attempt of a run was started with."""
    # Imported here: other commands do not need it.
    from ltui.app.presentation.run_configuration import code_lines
    from ltui.training.store.code_record import read_diff, read_records

    records = read_records(run_dir)
    if not records:
        raise ProblemError.of(
            where=run_dir.id,
            what="no code was recorded for this run.",
            remedy="It is recorded some seconds after the start of a run.",
        )
    diff = read_diff(run_dir, records[-1].attempt)
    if as_json:
        print_envelope(
            [{**to_json(record), "diff": read_diff(run_dir, record.attempt)} for record in records],
            truncated=any(r.diff_bytes and not r.diff_complete for r in records),
        )
    else:
        print("\n".join(code_lines(records, diff)))
    return EXIT_DONE
