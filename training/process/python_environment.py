"""The Python environment of ltui: command lines of its interpreter, and optional libraries.

The command lines start Python without the current folder on ``sys.path``. ``python -m`` and
``python -c`` import from the current folder first, where a project may have a ``queue.py``, and
where another user may have put one. Python's own ``-P`` needs version 3.11, and ``-I`` hides
packages that are installed for one user or named by ``PYTHONPATH``.

Optional libraries are those of file formats that ltui uses only if they are installed.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from typing import Any

from ltui.training.problem import Problem, ProblemError

_WITHOUT_CURRENT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
_RUN_MODULE = (
    f"{_WITHOUT_CURRENT_FOLDER}; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *words: str, python: str | None = None) -> list[str]:
    """Return the command line of ``python -m module words``; ``python`` is this interpreter."""
    return [python or sys.executable, "-c", _RUN_MODULE, module, *words]


def program_command(program: str, *, python: str) -> list[str]:
    """Return the command line of ``python -c program``."""
    return [python, "-c", f"{_WITHOUT_CURRENT_FOLDER}\n{program}"]


def user_umask() -> int:
    """Return the umask of the process that started the run, for the user's own commands."""
    return int(os.environ.get("LTUI_RUN_UMASK", "77"), 8)


def load_library(module: str, extra: str, where: str) -> Any:
    """Import a module of the extra ``extra``. Raise ``ProblemError`` if it is not installed.

    ``where`` is the option or setting that needs the module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ProblemError(missing_library(package, extra, where, f" ({error})")) from error


def missing_library(package: str, extra: str, where: str, reason: str = "") -> Problem:
    """Return the problem that a package of the extra ``extra`` cannot be imported."""
    return Problem(
        where=where,
        what=f"the package `{package}` cannot be imported{reason}.",
        remedy="Install it in the environment of ltui: "
        f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(requirement(extra))}",
    )


def requirement(extra: str) -> str:
    """Return the library that the extra ``extra`` of ltui needs, with its versions, for pip.

    The name of the library works however ltui itself was installed.
    """
    # Imported here because it loads many modules, and only an error message needs it.
    from importlib import metadata

    for line in metadata.requires("ltui-train") or ():
        library, _, marker = line.partition(";")
        if marker.split() == ["extra", "==", f'"{extra}"']:
            return library.strip()
    return extra
