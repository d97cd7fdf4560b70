"""Copy the code that ranks import to a folder that any Python interpreter can import from.

Ranks run in the user's environment, where ltui need not be installed. See
``docs/protocols.md``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from ltui.training.store.run_directory import private_folder

TRAINING_PACKAGE = Path(__file__).parents[1]
"""The folder of ``ltui.training``. On the path of a program of a run, the copy comes before it."""
RANK_SIDE = "rank-side"
"""Name of the folder of the home with the package of each version."""
_FOLDERS = ("shared", "tensor_queue", "rank", "models", "data")
_FILES = ("__init__.py",)
_SITE = '''"""Set up frozen code and stack dumps, then run the sitecustomize that this one hides."""
import importlib.machinery
import importlib.util
import os
import sys

if os.environ.get("LTUI_CODE_COPY"):
    try:
        from ltui.training.rank.frozen_imports import use_copy

        use_copy()
    except Exception as error:
        print(f"ltui: the frozen code is not used: {error}", file=sys.stderr)
try:
    from ltui.training.rank.stack_dump_setup import install_handler

    install_handler()
except Exception:
    pass


def _next():
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    return importlib.machinery.PathFinder.find_spec("sitecustomize", others)


_spec = _next()
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
'''
"""Content of ``sitecustomize.py``, which Python imports at startup if it is on the path."""
_METADATA = "Metadata-Version: 2.1\nName: ltui-rank\nVersion: 0\n"
_ENTRY_POINTS = """\
[lightning.pytorch.callbacks_factory]
ltui = ltui.training.rank.callback_factory:callbacks

[pytorch_lightning.callbacks_factory]
ltui = ltui.training.rank.callback_factory:callbacks

[torch.backends]
ltui = ltui.training.rank.program.attach:attach
"""


def install_rank_package(home: Path) -> Path:
    """Return the folder to add to ``PYTHONPATH``. Create the folder of this version if needed.

    Raises ``OSError`` if it cannot be written, and ``ProblemError`` if another user could change
    what the ranks import.
    """
    files = _files()
    folder = home / RANK_SIDE / _digest(files)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    private_folder(folder.parent, "Remove it, or set LTUI_HOME to a directory of your own.")
    if _is_complete(folder, files):
        return folder
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    if folder.is_dir():
        # After a power failure a file may exist without its content.
        os.rename(folder, temporary / "broken")
        shutil.rmtree(temporary / "broken", ignore_errors=True)
    try:
        for name, data in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        os.rename(temporary, folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.is_dir():
            raise
        # Another launch created the folder first.
    return folder


def _is_complete(folder: Path, files: dict[str, bytes]) -> bool:
    """Return True if every file exists with its full size."""
    try:
        return all((folder / name).stat().st_size == len(data) for name, data in files.items())
    except OSError:
        return False


def _files() -> dict[str, bytes]:
    """Return the files of the package: path below the folder -> content."""
    sources = [TRAINING_PACKAGE / name for name in _FILES if (TRAINING_PACKAGE / name).exists()]
    for name in _FOLDERS:
        sources += sorted((TRAINING_PACKAGE / name).glob("**/*.py"))
    files = {
        f"ltui/training/{path.relative_to(TRAINING_PACKAGE).as_posix()}": path.read_bytes()
        for path in sources
    }
    files["ltui_rank/__init__.py"] = (TRAINING_PACKAGE / "rank_api" / "__init__.py").read_bytes()
    files["sitecustomize.py"] = _SITE.encode()
    files["ltui_rank-0.dist-info/METADATA"] = _METADATA.encode()
    files["ltui_rank-0.dist-info/entry_points.txt"] = _ENTRY_POINTS.encode()
    return files


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:16]
