"""Libraries of file formats that ltui uses only if they are installed."""

from __future__ import annotations

import importlib
import shlex
import sys
from typing import Any

from ltui.training.problem import ProblemError


def load_library(module: str, extra: str, where: str) -> Any:
    """Import a module of the extra ``extra``. Raise ``ProblemError`` if it is not installed.

    ``where`` is the option or setting that needs the module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ProblemError.of(
            where=where,
            what=f"the package `{module.split('.')[0]}` cannot be imported ({error}).",
            remedy="Install it in the environment of ltui: "
            f"{shlex.quote(sys.executable)} -m pip install 'ltui-train[{extra}]'",
        ) from error
