"""The output of a command: its exit code, and standard output or a file with its formats.

A file appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ltui.training.problem import ProblemError

EXIT_DONE = 0
"""The command succeeded, or the run finished."""
EXIT_FAILED = 1
"""The run failed, or the request was not carried out."""
EXIT_BAD_INPUT = 2
"""The input was wrong; nothing was started or changed."""
EXIT_STOPPED = 3
"""The run stopped and can be resumed."""
EXPORT_FORMATS = {
    "csv": "a CSV table",
    "json": "a JSON table",
    "parquet": "a Parquet table",
    "tensorboard": "TensorBoard event files, in a folder",
}
"""Name and description of each format in which the metrics of runs can be written."""
FOLDER_FORMAT = "tensorboard"
"""The format that is a folder with several files."""
PRINTED_FORMATS = ("csv", "json")
"""Formats that standard output can have."""


class PlainText:
    """A stream that removes escape sequences, of which text of files and libraries may consist."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # Imported here: most commands write nothing to such a stream.
        from ltui.widgets.sanitise import without_controls

        self._stream.write(without_controls(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def refuse_existing(path: str | None, *, force: bool) -> None:
    """Raise ``ProblemError`` if ``path`` is a file, which would be replaced, unless ``force``."""
    if path not in (None, "-") and not force and Path(path or "").is_file():
        raise ProblemError.of(
            where=f"-o {path}",
            what="the file exists already.",
            remedy="Replace it with --force, or choose another name.",
        )


@contextmanager
def output(path: str | None) -> Iterator[TextIO]:
    """Yield standard output, or a file that appears under its name only when it is complete."""
    if path is None or path == "-":
        yield sys.stdout
        return
    with (
        replaced_file(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        yield file


@contextmanager
def replaced_file(path: str) -> Iterator[Path]:
    """Yield a temporary file beside ``path``, which replaces it when the block ends.

    A device or a pipe, such as ``/dev/null``, is written to and never replaced.
    """
    target = Path(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        yield target
        return
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise _unwritable(path, error) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def print_json(document: object, stream: TextIO | None = None) -> None:
    """Print one JSON document, by default on standard output."""
    json.dump(document, stream or sys.stdout, indent=1, allow_nan=False)
    print(file=stream)


SCHEMA = 1
"""Version of the envelope."""


def print_envelope(data: object, next_commands: Sequence[str] = ()) -> None:
    """Print one JSON line for programs: the data, and the commands that usually follow."""
    document = {"schema": SCHEMA, "ok": True, "data": data, "next": list(next_commands)}
    print(json.dumps(document, allow_nan=False))


def print_json_list(documents: Sequence[str]) -> None:
    """Print a list of JSON documents, one on each line.

    Thousands of them take seconds if they are indented, which Python does not do in C.
    """
    lines = ",\n".join(documents)
    print(f"[\n{lines}\n]" if lines else "[]")


def _unwritable(path: str, error: OSError) -> ProblemError:
    return ProblemError.of(
        where=f"-o {path}",
        what=f"the file cannot be written ({error.strerror or error}).",
        remedy="Choose a directory that you can write to.",
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
