"""The rooms' walls as they are at run time: import-linter sees the text, these see the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("app", "training", "widgets", "presets")
WITH_TORCH = (
    "training/rank/",
    "training/models/",
    "training/data/",
    "training/tensor_queue/queue_writer.py",
)


def _modules() -> list[str]:
    """Every module of the packages that must not load torch."""
    names = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            if not relative.startswith(WITH_TORCH) and not relative.endswith("__main__.py"):
                name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                names.append(f"ltui.{name}")
    return names


def _loaded_by(modules: list[str]) -> dict[str, list[str]]:
    """Which heavy packages are loaded after each module, imported in turn in one new process."""
    program = """
import importlib, json, sys
heavy = ("torch", "lightning", "pytorch_lightning", "torchvision", "sklearn", "ffcv", "numba")
seen = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    seen[name] = [h for h in heavy if h in sys.modules]
print(json.dumps(seen))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    result: dict[str, list[str]] = json.loads(done.stdout)
    return result


def test_watchers_never_load_torch() -> None:
    guilty = {name: heavy for name, heavy in _loaded_by(_modules()).items() if heavy}
    assert not guilty


def test_the_check_above_would_notice() -> None:
    assert _loaded_by(["ltui.training.tensor_queue.queue_writer"]) == {
        "ltui.training.tensor_queue.queue_writer": ["torch"]
    }


@pytest.mark.parametrize("room", ["widgets", "training"])
def test_a_room_loads_without_the_other(room: str) -> None:
    other = {"widgets": "training", "training": "widgets"}[room]
    modules = [m for m in _modules() if m.startswith(f"ltui.{room}")]
    program = (
        "import importlib, json, sys\n"
        "[importlib.import_module(n) for n in json.loads(sys.argv[1])]\n"
        "print([m for m in sys.modules if m.startswith((sys.argv[2], 'ltui.app'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules), f"ltui.{other}"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_front_ends_never_load_pyzmq() -> None:
    # Only a run on several machines pays for its import, in its own processes. `ltui join` talks to
    # the head itself.
    joining = (
        *("ltui.app.nodes", "ltui.app.commands.join"),
        # What a batch script runs on the nodes of its job.
        *("ltui.app.slurm.job_process", "ltui.app.slurm.job_nodes"),
    )
    front_ends = ("ltui.app", "ltui.widgets", "ltui.presets")
    modules = [m for m in _modules() if m.startswith(front_ends) and not m.startswith(joining)]
    assert modules
    program = (
        "import importlib, json, sys\n"
        "[importlib.import_module(n) for n in json.loads(sys.argv[1])]\n"
        "print('zmq' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_what_a_command_prints_needs_no_textual() -> None:
    # The themes, which `ltui config` checks, are Textual's.
    modules = {m for m in _modules() if m.startswith("ltui.app.commands.")}
    modules.remove("ltui.app.commands.config")
    program = (
        "import importlib, json, sys\n"
        "[importlib.import_module(n) for n in json.loads(sys.argv[1])]\n"
        "print('textual' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(sorted(modules))],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == "False"
