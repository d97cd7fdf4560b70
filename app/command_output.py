"""The output of a command: its exit code, and standard output or a file with its formats.

A file appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypedDict, TypeVar

from ltui.training.problem import ProblemError

_Result = TypeVar("_Result")
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


class OutputError(Exception):
    """Standard output cannot be written, for example because the disk is full."""


class CheckedOutput:
    """Standard output, whose errors differ from those of other files: see ``OutputError``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return _checked(lambda: self._stream.write(text))

    def flush(self) -> None:
        _checked(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _checked(write: Callable[[], _Result]) -> _Result:
    try:
        return write()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from error


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
    with _write_errors(f"-o {path}", "file"):
        if target.exists() and not target.is_file() and not target.is_dir():
            yield target
            return
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def folder_errors(folder: Path, option: str = "-o") -> AbstractContextManager[None]:
    """Raise ``ProblemError`` if the folder, the value of ``option``, cannot be written."""
    return _write_errors(f"{option} {folder}", "folder")


SCHEMA = 1
"""Version of the envelope."""


class OneOf(NamedTuple):
    """Forms of the data of a command, of which its options choose one."""

    forms: tuple[Any, ...]


class ErrorDocument(TypedDict):
    """What was wrong, in the envelope."""

    code: str
    message: str
    remedy: str | None


class Envelope(TypedDict):
    """What every command prints with ``--json``."""

    schema: int
    ok: bool
    """False if and only if there is an error."""
    data: Any
    """The answer of the command; null if there is none."""
    next: list[str]
    """Command lines that usually follow."""
    truncated: bool
    """True if the answer leaves out a part of what was asked for."""
    error: ErrorDocument | None


def print_envelope(
    data: object,
    next_commands: Sequence[str] = (),
    *,
    truncated: bool = False,
    error: ProblemError | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print one line of JSON for programs, by default on standard output.

    NaN and infinities become texts.
    """
    # Imported here: the help of a command does without msgspec.
    from ltui.training.json_codec import to_json

    document: Envelope = {
        "schema": SCHEMA,
        "ok": error is None,
        "data": to_json(data),
        "next": list(next_commands),
        "truncated": truncated,
        "error": None if error is None else _error_document(error),
    }
    print(json.dumps(document, allow_nan=False), file=stream)


def print_envelope_of_list(documents: Sequence[str]) -> None:
    """Print the envelope of a list of JSON documents, each of them on a line.

    Thousands of them would take long to parse and to print again.
    """
    empty = StringIO()
    print_envelope([], stream=empty)
    lines = ",\n".join(documents)
    print(empty.getvalue().replace("[]", f"[\n{lines}\n]" if lines else "[]", 1), end="")


def _error_document(error: ProblemError) -> ErrorDocument:
    remedies = dict.fromkeys(problem.remedy for problem in error.problems if problem.remedy)
    messages = " ".join(f"{problem.where}: {problem.what}" for problem in error.problems)
    return {
        "code": error.code,
        "message": " ".join(messages.splitlines()),
        "remedy": " ".join(remedies) or None,
    }


@contextmanager
def _write_errors(where: str, kind: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # of `-o /dev/stdout`
        raise
    except OSError as error:
        raise ProblemError.of(
            where=where,
            what=f"the {kind} cannot be written ({error.strerror or error}).",
            remedy="Choose a directory that you can write to.",
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
