"""``ltui incident`` and ``ltui open``: give minutes of a run to other people, and look at them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

from ltui.app.command_output import (
    EXIT_DONE,
    EXIT_FAILED,
    folder_errors,
    print_envelope,
    refuse_existing,
    replaced_file,
)
from ltui.app.state_words import verdict_line
from ltui.app.temporary_folder import temporary_folder
from ltui.training.problem import ProblemError
from ltui.training.state.asked_moment import clock_time
from ltui.training.state.run_snapshot import RunSnapshot, Verdict
from ltui.training.store.find_run import find_run
from ltui.training.store.history_reader import RunStore
from ltui.training.store.incident_file import (
    SUFFIX,
    Incident,
    PackedFile,
    open_incident,
    packed_files,
    write_incident,
)
from ltui.training.store.redaction import Redactor
from ltui.training.store.run_directory import RunDir, ltui_home, read_json
from ltui.widgets.sanitise import clean_line, clean_name

BEFORE_S, AFTER_S = 480.0, 120.0
"""Seconds before and after the moment of an incident that a file has."""
_FORMS = "Give verdict:N, or a time such as 03:12 or 2026-11-26T03:12."

DATA = {
    "incident": {
        "path": str | None, "bytes": int | None, "about": str, "begin": float, "end": float,
        "files": [{"name": str, "bytes": int, "note": str}], "replaced": dict[str, int],
    },
}  # fmt: skip
"""What ``--json`` prints; see ``for_programs``."""


def incident(options: Namespace) -> int:
    """Run ``ltui incident RUN``."""
    # Imported here: `ltui open` asks no run.
    from ltui.training.lifecycle.run_status import resolve_snapshot

    run_dir = find_run(ltui_home(to_write=False), options.run)
    path = options.output or f"{run_dir.id}{SUFFIX}"
    refuse_existing(path, force=options.force)
    if Path(path).exists() and not Path(path).is_file():
        remedy = "Choose another name."
        raise ProblemError.of(where=f"-o {path}", what="it is no regular file.", remedy=remedy)
    snapshot = resolve_snapshot(run_dir)
    what = _incident(run_dir, snapshot, options.around)
    redactor = _redactor(run_dir, snapshot)
    with temporary_folder("ltui-incident-") as work:
        files = packed_files(run_dir, what, redactor, work)
    if not options.json:
        print("\n".join(_listed(what, files, redactor)))
    written = options.yes or options.json or not sys.stdin.isatty() or _agreed(path)
    if written:
        os.umask(0o077)  # The file is for those to whom its owner gives it.
        with replaced_file(path) as temporary:
            write_incident(files, temporary)
    if options.json:
        print_envelope(
            {
                "path": path,
                "bytes": Path(path).stat().st_size,
                "about": what.about,
                "begin": what.begin,
                "end": what.end,
                "files": [
                    {"name": file.name, "bytes": len(file.data), "note": file.note}
                    for file in files
                ],
                "replaced": redactor.replaced,
            },
            [f"ltui open {shlex.quote(path)} --plain"],
        )
    elif written:
        print(f"{path} is written. To look at it: ltui open {shlex.quote(path)}")
    else:
        print("Nothing was written.")
    return EXIT_DONE if written else EXIT_FAILED


def _agreed(path: str) -> bool:
    try:
        return input(f"Write {path}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _incident(run_dir: RunDir, snapshot: RunSnapshot, around: str | None) -> Incident:
    """Return the minutes that ``--around`` names: without it, those of the last verdict, or the
    last ones. Raises ``ProblemError``."""
    with RunStore(run_dir) as store:
        verdicts = [verdict for verdict in store.verdicts() if verdict.began is not None]
    number, is_verdict = len(verdicts), around is None or around.startswith("verdict:")
    if around is not None and is_verdict:
        text = around.removeprefix("verdict:")
        number = int(text) if text.isascii() and text.isdecimal() else 0
        if not 0 < number <= len(verdicts):
            raise ProblemError.of(
                where=f"--around {around}",
                what="the run has no such verdict.",
                remedy=" ".join(_numbered(verdicts)) or "It has none.",
            )
    if is_verdict and number:
        moment, about = verdicts[number - 1].began or 0.0, _numbered(verdicts)[number - 1]
    elif around is not None:
        at = clock_time(around, time.time())
        if at is None:
            where = f"--around {around}"
            raise ProblemError.of(where=where, what="invalid value.", remedy=_FORMS)
        moment = at
        about = f"around {_clock(moment)}"
    else:
        moment, about = (snapshot.ended_at or time.time()) - AFTER_S, "the last minutes"
    return Incident(
        run=run_dir.id,
        begin=moment - BEFORE_S,
        end=moment + AFTER_S,
        about=about,
        host=os.uname().nodename,
    )


def _numbered(verdicts: list[Verdict]) -> list[str]:
    return [
        f"verdict:{number} at {_clock(verdict.began or 0.0)}: {verdict_line(verdict)}"
        for number, verdict in enumerate(verdicts, 1)
    ]


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _redactor(run_dir: RunDir, snapshot: RunSnapshot) -> Redactor:
    spec = run_dir.read_spec()
    start = read_json(run_dir.engine_start_path(snapshot.attempt)) or {}
    environment = start.get("env", {})
    variables = environment if isinstance(environment, dict) else {}
    home = Path.home()
    folders = {str(home.resolve()): "~", str(home): "~"}
    folders |= {str(run_dir.home): "<ltui>", spec.cwd: "<program>"}
    everything = {**os.environ, **{str(k): str(v) for k, v in variables.items()}, **spec.env}
    paths = (run_dir.secret_digests_path(n) for n in range(1, snapshot.attempt + 1))
    return Redactor(everything, folders, [found for path in paths if (found := read_json(path))])


def _listed(what: Incident, files: list[PackedFile], redactor: Redactor) -> list[str]:
    """Return what an incident file holds, and what was replaced in it."""
    lines = [
        f"{clean_name(what.run)}, {_clock(what.begin)} to {_clock(what.end)}",
        f"  {clean_line(what.about, 200)}",
    ]
    lines += [
        f"  {clean_name(file.name)}, {len(file.data):,} bytes{', ' * bool(file.note)}{file.note}"
        for file in files
    ]
    lines += [
        f"  replaced {count:,} times: {clean_line(name, 100)}"
        for name, count in sorted(redactor.replaced.items())
    ]
    return [
        *lines,
        "  Not replaced: names of machines, users and metrics, and what has no known form.",
    ]


def open_file(options: Namespace) -> int:
    """Run ``ltui open FILE``."""
    if options.to is not None:
        target = Path(options.to).absolute()
        if target.exists():
            raise ProblemError.of(where=f"--to {options.to}", what="it exists already.")
        with folder_errors(Path(options.to), "--to"):
            target.mkdir(mode=0o700, parents=True)
            try:
                run_dir, _, note = open_incident(Path(options.file), target)
            except BaseException:
                shutil.rmtree(target, ignore_errors=True)
                raise
        _print_note(note)
        print(f"Now: LTUI_HOME={shlex.quote(str(target))} ltui show {run_dir.id}")
        return EXIT_DONE
    with temporary_folder("ltui-open-") as home:
        run_dir, what, note = open_incident(Path(options.file), home)
        _print_note(note)
        if options.plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return _report(home, run_dir, what)
        # Imported here: the report needs no screen.
        from ltui.app.open_dashboard import run_dashboard

        remove = partial(shutil.rmtree, home, ignore_errors=True)
        return run_dashboard(home, run=run_dir, readonly=True, before_exit=remove)


def _print_note(note: str | None) -> None:
    if note is not None:
        sys.stderr.write(f"{clean_line(note, 300)}\n")


def _report(home: Path, run_dir: RunDir, what: Incident) -> int:
    """Print what `ltui show` and `ltui diagnose` print of the run."""
    # Imported here, as above.
    from ltui.app.command_line.parser import build_parser
    from ltui.app.commands.diagnose import diagnose
    from ltui.app.commands.runs import show

    print(f"{_clock(what.begin)} to {_clock(what.end)}: {clean_line(what.about, 300)}\n")
    os.environ["LTUI_HOME"] = str(home)
    show(build_parser("show").parse_args(["show", run_dir.id]))
    print()
    return diagnose(build_parser("diagnose").parse_args(["diagnose", run_dir.id]))
