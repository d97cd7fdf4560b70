"""The rooms' walls as they are at run time: import-linter sees the text, these see the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITH_TORCH = (
    "training/rank/",
    "training/models/",
    "training/data/",
    "training/tensor_queue/queue_writer.py",
)
HEAVY = ("torch", "lightning", "pytorch_lightning", "torchvision", "sklearn", "ffcv", "numba")
_PROGRAM = """
import importlib, sys
unwanted, *modules = sys.argv[1:]
for name in modules:
    importlib.import_module(name)
    loaded = [m for m in sys.modules if m.startswith("ltui.") or "." not in m]
    if bad := sorted(m for m in loaded if f"{m}.".startswith(tuple(unwanted.split()))):
        print(name, "loads", *bad)
        break
"""


def modules(*beginnings: str, without: tuple[str, ...] = ()) -> list[str]:
    """Every module of the packages that must not load torch, whose name begins so."""
    names = []
    for room in ("app", "training", "widgets", "presets"):
        for path in sorted((ROOT / room).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            if not relative.startswith(WITH_TORCH) and not relative.endswith("__main__.py"):
                name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                names.append(f"ltui.{name}")
    found = [n for n in names if n.startswith(beginnings or "ltui.") and not n.startswith(without)]
    assert found
    return found


def loads(names: list[str], unwanted: Iterable[str]) -> str:
    """Import the modules in turn in one new process. Return which first loads what is unwanted."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, " ".join(f"{name}." for name in unwanted), *names],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout


JOINING = (
    *("ltui.app.nodes", "ltui.app.commands.join"),
    *("ltui.app.slurm.job_process", "ltui.app.slurm.job_nodes"),
)
"""Modules that talk to a node 0, or run on the nodes of a job. Only a run on several machines pays
for the import of pyzmq, in its own processes; `ltui join` talks to the head itself."""


@pytest.mark.parametrize(
    ("names", "unwanted"),
    [
        pytest.param(modules("ltui.training"), ("ltui.widgets", "ltui.app", *HEAVY), id="training"),
        pytest.param(
            modules("ltui.widgets"), ("ltui.training", "ltui.app", "zmq", *HEAVY), id="widgets"
        ),
        pytest.param(
            modules("ltui.app", "ltui.presets", without=JOINING), ("zmq", *HEAVY), id="front ends"
        ),
        pytest.param(modules(*JOINING), HEAVY, id="joining"),
        # The themes, which `ltui config` checks, are Textual's.
        pytest.param(
            modules("ltui.app.commands.", without=("ltui.app.commands.config",)),
            ("textual",),
            id="commands",
        ),
    ],
)
def test_a_module_never_loads_what_its_package_does_without(
    names: list[str], unwanted: tuple[str, ...]
) -> None:
    assert loads(names, unwanted) == ""


def test_what_is_loaded_is_noticed() -> None:
    reader = "ltui.training.data.ffcv.beton_file"
    assert loads([reader], ["numpy", "torch"]) == f"{reader} loads numpy\n"
