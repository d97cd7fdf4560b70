"""Command lines that start Python without the current folder on ``sys.path``.

``python -m`` and ``python -c`` import from the current folder first, where a project may have a
``queue.py``, and where another user may have put one. Python's own ``-P`` needs version 3.11, and
``-I`` hides packages that are installed for one user or named by ``PYTHONPATH``.
"""

from __future__ import annotations

import sys

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
