"""The ``ltui`` command: parse the arguments, call the function of the command, print errors.

Only the standard library is imported before the command is known. ``ltui`` without arguments opens
the dashboard and does not build the argument parser at all.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import TYPE_CHECKING

from ltui.app.command_output import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    CheckedOutput,
    OutputError,
    PlainText,
    print_envelope,
)
from ltui.training.problem import Problem, ProblemError

if TYPE_CHECKING:
    from argparse import Namespace

CRASH_LOG = "crash.log"
"""File in ltui's home that errors of ltui itself are appended to."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # The caller closed it: what is opened next has its number.
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115
    # Print a replacement for a character that the terminal cannot show, instead of failing.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    with redirect_stderr(PlainText(sys.stderr)), redirect_stdout(CheckedOutput(sys.stdout)):
        try:
            code = _guarded(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
        except (BrokenPipeError, OutputError) as error:
            # Avoid an error message at interpreter exit. A reader that closed the pipe needs none.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if isinstance(error, OutputError):
                _print_error(f"Standard output cannot be written ({error}).")
            return EXIT_FAILED
    return code


def _guarded(argv: list[str]) -> int:
    options: Namespace | None = None
    try:
        options = _parse_arguments(argv) if argv else None
        return _run_command(options)
    except ProblemError as error:
        for problem in error.problems:
            _print_error(str(problem))
            if problem.excerpt is not None:
                sys.stderr.write(f"{problem.excerpt}\n")
        if _wants_json(options, argv):
            print_envelope(None, error=error)
        return EXIT_BAD_INPUT
    except (BrokenPipeError, OutputError):
        raise
    except KeyboardInterrupt:
        _print_error("Interrupted.")
        return 130
    except MemoryError:
        _print_error("There is not enough memory. Raise the limit (ulimit -v) or free some.")
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the top of the process
        sentence = _report_crash(error)
        if _wants_json(options, argv):
            crash = Problem("ltui", sentence, code="internal")
            print_envelope(None, error=ProblemError(crash))
        return EXIT_FAILED


def _wants_json(options: Namespace | None, argv: Sequence[str]) -> bool:
    """Return whether the answer is for a program; ``options`` are None if they are wrong."""
    return bool(getattr(options, "json", options is None and "--json" in argv))


def _report_crash(error: Exception) -> str:
    """Print one sentence about an error that no command expects, and store where it was raised."""
    from traceback import format_exception

    from ltui.training.store.run_directory import ltui_home, open_private_log

    text = "".join(format_exception(error))
    sentence = f"ltui failed unexpectedly: {type(error).__name__}: {error}."
    try:
        path = ltui_home() / CRASH_LOG
        with open_private_log(path) as log:
            log.write(f"{' '.join(sys.argv)}\n{text}\n".encode(errors="replace"))
    except (OSError, ProblemError):
        sys.stderr.write(text)
    else:
        _print_error(f"{sentence} Details are in {path}.")
    return sentence


def _run_command(options: Namespace | None) -> int:
    if options is None:
        from ltui.app.commands.dashboard import show_dashboard

        return show_dashboard()
    module_name, function_name = options.do.split(":")
    # Imported late, so that each command loads only its own dependencies.
    module = importlib.import_module(f"ltui.app.commands.{module_name}")
    command: Callable[[Namespace], int] = getattr(module, function_name)
    return command(options)


def _parse_arguments(argv: list[str]) -> Namespace:
    from ltui.app.command_line.parser import build_parser

    command: list[str] | None = None
    if argv[:1] in (["exec"], ["submit"], ["sweep"]) and "--" in argv:
        # Split here, because argparse treats `--` before a remainder differently by version.
        at = argv.index("--")
        argv, command = argv[:at], argv[at + 1 :]
    options: Namespace = build_parser(argv[0]).parse_args(argv)
    if command is not None:
        options.command = [*getattr(options, "command", ()), *command]
    return options


def _print_error(line: str) -> None:
    # Imported here: only an error needs it. Messages contain text of files and of the user.
    from ltui.widgets.sanitise import clean_line

    sys.stderr.write(clean_line(" ".join(line.splitlines())) + "\n")


if __name__ == "__main__":
    sys.exit(main())
