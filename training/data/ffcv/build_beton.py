"""Builds and verifies ``.beton`` files as a process of its own, in the interpreter that trains:

    python -m ltui.training.data.ffcv.build_beton '{"do": "build", "source": ..., "output": ...}'

Prints one JSON object a line: ``{"done": n, "of": n}`` now and then, ``{"problem": {"where",
"what", "remedy"}}`` for each thing that is wrong (exit code 2), ``{"result": {...}}`` at the end.
What a dataset's own code prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ltui.training.data.cache_folder import data_folder
from ltui.training.data.ffcv.beton_file import BetonError
from ltui.training.data.ffcv.beton_sources import SourceError, open_source

EXIT_BAD_INPUT = 2
_PR_SET_PDEATHSIG = 1
_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TELL_EVERY_S = 0.2
_MANY = 20


class Reporter:
    """Writes lines to what was standard output."""

    def __init__(self) -> None:
        # Whatever else is printed here goes where errors go.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._due = 0.0

    def tell(self, **fields: Any) -> None:
        self._out.write(json.dumps(fields) + "\n")
        self._out.flush()

    def progress(self, done: int, of: int) -> None:
        if (now := time.monotonic()) >= self._due or done == of:
            self._due = now + _TELL_EVERY_S
            self.tell(done=done, of=of)

    def problem(self, where: str, what: str, remedy: str | None = None) -> None:
        self.tell(problem={"where": where, "what": what, "remedy": remedy})


def main(arguments: list[str]) -> int:
    for number in _LEAVE:
        signal.signal(number, _leave)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    asked = json.loads(arguments[0])
    reporter = Reporter()
    sys.path[:0] = [str(Path.cwd())]
    try:
        return {"build": _build, "verify": _verify}[asked["do"]](asked, reporter)
    except SourceError as error:
        reporter.problem(error.where, error.what, error.remedy)
    except BetonError as error:
        where, _, what = str(error).partition(": ")
        reporter.problem(where, what)
    except OSError as error:
        where = str(error.filename or asked.get("output") or asked.get("file"))
        reporter.problem(where, f"it can't be read or written ({error.strerror or error}).")
    except ModuleNotFoundError as error:
        reporter.problem(
            sys.executable, f"it lacks {error.name}.", "Install it: pip install ffcv torchvision"
        )
    return EXIT_BAD_INPUT


def _leave(signum: int, _: Any) -> None:
    """Unwinds, so that what is not whole is removed; undisturbed by a second signal."""
    for number in _LEAVE:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def _build(asked: Mapping[str, Any], reporter: Reporter) -> int:
    # Local: they import FFCV, which takes seconds; a source that is not there is told before.
    output = Path(asked["output"])
    dataset = open_source(asked["source"], data_folder())
    from ltui.training.data.ffcv.beton_writer import BadSamplesError, WriteOptions, write

    options = WriteOptions(**asked.get("options", {}))
    began = time.monotonic()
    try:
        bad = write(dataset, output, options, reporter.progress)
    except BadSamplesError as error:
        for sample in error.bad[:_MANY]:
            reporter.problem(
                asked["source"], f"{sample}.", "Repair or remove it, or build with --skip-bad."
            )
        return EXIT_BAD_INPUT
    reporter.tell(
        result={
            "output": str(output),
            "samples": len(dataset) - len(bad),
            "bytes": output.stat().st_size,
            "seconds": time.monotonic() - began,
            "left_out": [str(sample) for sample in bad],
            "classes": list(getattr(dataset, "classes", ())) or None,
        }
    )
    return 0


def _verify(asked: Mapping[str, Any], reporter: Reporter) -> int:
    from ltui.training.data.ffcv.verify_beton import verify

    bad = verify(Path(asked["file"]), asked["workers"], reporter.progress)
    reporter.tell(result={"bad": [{"sample": sample, "what": what} for sample, what in bad]})
    return 0


def build_source(source: str, output: Path) -> None:
    """Build ``output`` in a process of its own; ``BetonError`` with what was wrong."""
    output.parent.mkdir(parents=True, exist_ok=True)
    options = {"workers": max(1, len(os.sched_getaffinity(0)))}
    asked = {"do": "build", "source": source, "output": str(output), "options": options}
    program = subprocess.Popen(
        [sys.executable, "-m", "ltui.training.data.ffcv.build_beton", json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said, _ = program.communicate()
    finally:
        if program.poll() is None:
            program.terminate()  # it has a file to remove
            program.wait()
    lines = [json.loads(line) for line in said.splitlines()]
    problems = [line["problem"] for line in lines if "problem" in line]
    if problems:
        raise BetonError(f"{problems[0]['where']}: {problems[0]['what']}")
    if program.returncode != 0:
        raise BetonError(f"{source}: building {output} ended with exit code {program.returncode}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
