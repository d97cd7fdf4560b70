"""Program that builds and verifies ``.beton`` files, run by the interpreter that trains:

    python -m ltui.training.data.ffcv.beton_script '{"do": "build", "source": ..., "output": ...}'

It prints one JSON object per line: ``{"done": n, "of": n}`` periodically, ``{"problem": {"where",
"what", "remedy"}}`` for each problem (exit code 2) and ``{"result": {...}}`` at the end. Output of
the dataset's own code goes to standard error.
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

from ltui.training.data.data_files import data_folder
from ltui.training.data.ffcv.beton_file import BetonError
from ltui.training.data.ffcv.beton_sources import open_source

EXIT_BAD_INPUT = 2
_PR_SET_PDEATHSIG = 1
_EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PROGRESS_PERIOD_S = 0.2
_MAX_PROBLEMS = 20
"""Maximum number of bad samples to report."""


class Reporter:
    """Writes JSON lines to the original standard output."""

    def __init__(self) -> None:
        # All other output of this process goes to standard error.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._due = 0.0

    def write(self, **fields: Any) -> None:
        self._out.write(json.dumps(fields) + "\n")
        self._out.flush()

    def progress(self, done: int, of: int) -> None:
        """Write the progress, at most every ``_PROGRESS_PERIOD_S`` seconds."""
        if (now := time.monotonic()) >= self._due or done == of:
            self._due = now + _PROGRESS_PERIOD_S
            self.write(done=done, of=of)

    def problem(self, where: str, what: str, remedy: str | None = None) -> None:
        self.write(problem={"where": where, "what": what, "remedy": remedy})


def main(arguments: list[str]) -> int:
    """Run the request in ``arguments[0]``, a JSON object. Return the exit code."""
    for number in _EXIT_SIGNALS:
        signal.signal(number, _exit)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    request = json.loads(arguments[0])
    reporter = Reporter()
    sys.path.append(str(Path.cwd()))
    try:
        return {"build": _build, "verify": _verify}[request["do"]](request, reporter)
    except BetonError as error:
        where, _, text = str(error).partition(": ")
        reporter.problem(where, text)
    except OSError as error:
        where = str(error.filename or request.get("output") or request.get("file"))
        reporter.problem(where, f"it can't be read or written ({error.strerror or error}).")
    except ModuleNotFoundError as error:
        reporter.problem(
            sys.executable,
            f"package {error.name} is missing.",
            "Install it: pip install ffcv torchvision",
        )
    return EXIT_BAD_INPUT


def _exit(signum: int, _: Any) -> None:
    """Exit by an exception, so that incomplete files are removed. Ignore further signals."""
    for number in _EXIT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def _build(request: Mapping[str, Any], reporter: Reporter) -> int:
    # Local: importing FFCV takes seconds. A missing source is reported before.
    output = Path(request["output"])
    dataset = open_source(request["source"], data_folder())
    from ltui.training.data.ffcv.beton_writer import BadSamplesError, WriteOptions, write

    options = WriteOptions(**request.get("options", {}))
    began = time.monotonic()
    try:
        bad = write(dataset, output, options, reporter.progress)
    except BadSamplesError as error:
        for sample in error.bad[:_MAX_PROBLEMS]:
            reporter.problem(
                request["source"], f"{sample}.", "Repair or remove it, or build with --skip-bad."
            )
        return EXIT_BAD_INPUT
    reporter.write(
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


def _verify(request: Mapping[str, Any], reporter: Reporter) -> int:
    # Local: a build needs neither torch nor Pillow before its source is found.
    from ltui.training.data.ffcv.torch_dataset import verify

    bad = verify(Path(request["file"]), request["workers"], reporter.progress)
    reporter.write(result={"bad": [{"sample": sample, "what": text} for sample, text in bad]})
    return 0


def build_source(source: str, output: Path) -> None:
    """Build ``output`` in a separate process. Raises ``BetonError`` with the first problem."""
    output.parent.mkdir(parents=True, exist_ok=True)
    options = {"workers": max(1, len(os.sched_getaffinity(0)))}
    request = {"do": "build", "source": source, "output": str(output), "options": options}
    program = subprocess.Popen(
        [sys.executable, "-m", "ltui.training.data.ffcv.beton_script", json.dumps(request)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, _ = program.communicate()
    finally:
        if program.poll() is None:
            program.terminate()  # it removes its incomplete file
            program.wait()
    lines = [json.loads(line) for line in stdout.splitlines()]
    problems = [line["problem"] for line in lines if "problem" in line]
    if problems:
        raise BetonError(f"{problems[0]['where']}: {problems[0]['what']}")
    if program.returncode != 0:
        raise BetonError(f"{source}: building {output} ended with exit code {program.returncode}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
