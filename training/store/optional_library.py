"""Libraries of file formats that ltui uses only if they are installed."""

from __future__ import annotations

import importlib
import shlex
import sys
from importlib import metadata
from typing import Any

from ltui.training.problem import Problem, ProblemError


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
    for line in metadata.requires("ltui-train") or ():
        library, _, marker = line.partition(";")
        if marker.split() == ["extra", "==", f'"{extra}"']:
            return library.strip()
    return extra
