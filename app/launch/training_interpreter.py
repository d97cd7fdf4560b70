"""The interpreter that trains: choose it, check that it has what a run needs, and ask what its
torch sees of this machine's GPUs.

The classes that a configuration names must exist and accept the given arguments. That is checked
with what ``probe_script.py`` read from the sources without importing them. Checks that need the
real classes are in ``run_in_interpreter.py``.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ltui.app.launch import probe_script
from ltui.training.config.presets import DISTRIBUTIONS
from ltui.training.config.yaml_document import Fault, parse_value
from ltui.training.lifecycle.rank_package import TRAINING_PACKAGE
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.python_environment import program_command

MIN_PYTHON = (3, 10)
"""Oldest supported version of Python."""
REQUIRED_PACKAGES = {
    "torch": "torch",
    "lightning": "lightning",
    "jsonargparse": "jsonargparse[signatures]",
}
"""Modules that every LightningCLI run imports, with their names for pip."""
_ALTERNATIVES = {"lightning": "pytorch_lightning"}
"""Modules that can replace a required one. Lightning is published as two packages, and either is
enough."""
MALICIOUS_VERSIONS = frozenset({"2.6.2", "2.6.3"})
"""Releases of lightning and pytorch-lightning that run malicious code when they are imported."""
ADVISORY = "GHSA-w37p-236h-pfx3"
"""GitHub security advisory of the malicious releases."""
_PIP_NAMES = {**REQUIRED_PACKAGES, **DISTRIBUTIONS}
"""Module name to the name that pip installs it by, where the two differ."""


class InterpreterReport(Struct, frozen=True, kw_only=True):
    """The answer of the probe that ran in an interpreter."""

    python: str
    version: str
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Module name to version; None if the module is missing."""
    classes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Place in the configuration to the facts about its class."""


def choose_python(named: str | None, environment: Mapping[str, str]) -> str:
    """Return the path of the interpreter that ranks run in. Links are kept: a venv's python is a
    link."""
    if named is not None:
        return _resolve_python(named)
    active = environment.get("VIRTUAL_ENV")
    if active:
        return _environment_python(active)
    if find_spec("torch") is not None:
        return sys.executable
    return shutil.which("python3", path=environment.get("PATH")) or sys.executable


def _resolve_python(text: str) -> str:
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    executable = shutil.which(str(path))
    if executable is None:
        raise ProblemError.of(
            where=f"--python {text}",
            what="no executable program was found there.",
            remedy="Give the path of a Python interpreter, such as .venv/bin/python.",
        )
    return os.path.abspath(executable)


def _environment_python(active: str) -> str:
    path = Path(active) / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise ProblemError.of(
            where=f"VIRTUAL_ENV={active}",
            what="this virtual environment has no bin/python.",
            remedy="Activate another one, or give the interpreter with --python.",
        )
    return str(path.absolute())


def probe_interpreter(
    python: str,
    packages: Sequence[str],
    class_paths: Mapping[str, str] | None = None,
    folders: Sequence[str] = (),
) -> InterpreterReport:
    """Run the probe in ``python``, which takes about 0.1 s. Raises ``ProblemError`` if it gives
    no answer."""
    question = {
        "packages": [*packages, *_ALTERNATIVES.values()],
        "distributions": DISTRIBUTIONS,
        "class_paths": dict(class_paths or {}),
        "folders": list(folders),
        # Ranks get these from ltui itself, even if the interpreter has no ltui.
        "provided": {"ltui.training": str(TRAINING_PACKAGE)},
    }
    errors = ""
    try:
        process = subprocess.run(
            [python, probe_script.__file__],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        errors = process.stderr
        answer = json.loads(process.stdout)
        return InterpreterReport(
            python=python,
            version=answer["python"],
            packages=answer["packages"],
            classes=answer["classes"],
        )
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        reason = errors.strip().splitlines()[-1][:200] if errors.strip() else type(error).__name__
        raise ProblemError.of(
            where=python,
            what=f"this is not a working Python 3.10 or newer ({reason}).",
            remedy="Give another interpreter with --python.",
        ) from error


def missing_packages(report: InterpreterReport, needed: Mapping[str, str]) -> list[Problem]:
    """Return a problem that names the packages of ``needed`` (module to pip name) that are missing.

    The problem contains the command that installs them. A Python that is too old is also a problem.
    """
    if _version_numbers(report.version) < MIN_PYTHON:
        return [
            Problem(
                where=report.python,
                what=f"this is Python {report.version}; training needs Python 3.10 or newer.",
                remedy="Give another interpreter with --python.",
            )
        ]
    # Modules that were not queried are in ``needed`` because a class cannot import them.
    missing = [module for module in needed if installed_version(report, module) is None]
    if not missing:
        return []
    command = install_command(report.python, [needed[module] for module in missing])
    return [
        Problem(
            where=report.python,
            what=f"{_join_names(missing)} {'is' if len(missing) == 1 else 'are'} not installed in "
            "this interpreter, which would train the run.",
            remedy=f"Activate the environment that has them, or install them with: {command}",
        )
    ]


def malicious_packages(report: InterpreterReport) -> list[Problem]:
    """Return a problem for each installed release of Lightning that is known to be malicious."""
    return [
        Problem(
            where=report.python,
            what=f"{pip_name} {version} is a malicious release ({ADVISORY}).",
            remedy="Assume that credentials on this machine were stolen and revoke them. "
            f"Replace it with: {install_command(report.python, [f'{pip_name}!=2.6.2,!=2.6.3'])}",
        )
        for module, pip_name in (
            ("lightning", "lightning"),
            ("pytorch_lightning", "pytorch-lightning"),
        )
        if (version := report.packages.get(module)) in MALICIOUS_VERSIONS
    ]


def installed_version(report: InterpreterReport, module: str) -> str | None:
    """Return the version of a package or of its alternative, or None if both are missing."""
    packages = report.packages
    return packages.get(module) or packages.get(_ALTERNATIVES.get(module, module))


def install_command(python: str, packages: Sequence[str]) -> str:
    """Return the pip command that installs ``packages``, quoted for a shell."""
    quoted = [f"'{name}'" if set(name) & set("[!<>=") else name for name in packages]
    return f"{python} -m pip install {' '.join(quoted)}"


def missing_class_imports(report: InterpreterReport) -> dict[str, str]:
    """Return the modules that the inspected classes import and that are not installed."""
    return pip_names(
        sorted({name for facts in report.classes.values() for name in facts.get("lacks", ())})
    )


def pip_names(modules: Sequence[str]) -> dict[str, str]:
    """Return each module name with the name that pip installs it by."""
    return {module: _PIP_NAMES.get(module, module) for module in modules}


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split(".")[:2])


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


_TIMEOUT_S = 60.0
"""Seconds to wait for the answer. To import torch and to open the driver takes some seconds."""
_PROGRAM = """
import json, os, warnings
# With this variable, which Lightning sets, torch counts the GPUs of NVML and does not try CUDA.
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    nccl = None
reasons = [str(warning.message) for warning in caught if "CUDA" in str(warning.message)]
print(json.dumps({
    "cuda": torch.version.cuda, "nccl": nccl, "devices": devices,
    "reason": reasons[-1] if reasons else None,
}))
"""


class CudaReport(Struct, frozen=True, kw_only=True):
    """What torch says about CUDA."""

    cuda: str | None
    """Version of CUDA that torch is built for; None for a build without CUDA."""
    nccl: str | None
    devices: int
    """GPUs that torch can use."""
    reason: str | None = None
    """Torch's warning, usually why there are none."""

    def versions(self) -> str:
        """Return the versions, such as ``CUDA 13.0, NCCL 2.28.9``."""
        names = (("CUDA", self.cuda), ("NCCL", self.nccl))
        return ", ".join(f"{name} {version}" for name, version in names if version is not None)

    def why_no_device(self) -> str:
        """Return why torch can use no GPU of this machine, in a line."""
        if self.cuda is None:
            return "it is built without CUDA"
        first = (self.reason or "").partition("(Triggered")[0].partition(". ")[0].strip()
        return f"{self.versions()}: {first or 'none is visible to it'}"


def probe_cuda(python: str) -> CudaReport | None:
    """Run the probe in ``python``, which takes some seconds; None if it gives no answer."""
    try:
        done = subprocess.run(
            program_command(_PROGRAM, python=python),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return CudaReport(**json.loads(done.stdout))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return None


class ClassUse(Struct, frozen=True):
    """A ``class_path`` in a configuration."""

    place: str
    """Path in the configuration: ``model``, ``trainer.callbacks.0``."""
    class_path: str
    init_args: Mapping[str, Any]


def class_uses(document: object, place: str = "") -> list[ClassUse]:
    """Return every full class path in a configuration, with its arguments."""
    uses: list[ClassUse] = []
    if isinstance(document, Mapping):
        path = document.get("class_path")
        if isinstance(path, str) and "." in path:
            arguments = document.get("init_args")
            uses.append(ClassUse(place, path, arguments if isinstance(arguments, Mapping) else {}))
        for key, value in document.items():
            uses += class_uses(value, f"{place}.{key}" if place else str(key))
    elif isinstance(document, (list, tuple)):
        for index, value in enumerate(document):
            uses += class_uses(value, f"{place}.{index}")
    return uses


def class_faults(uses: Sequence[ClassUse], report: InterpreterReport) -> list[Fault]:
    """Return the classes that cannot be imported, and the arguments that an ``__init__`` does
    not accept."""
    faults: list[Fault] = []
    for use in uses:
        facts = report.classes.get(use.place) or {}
        if facts.get("missing"):
            faults.append(_missing_class(use, facts))
        elif facts.get("parameters") is not None:
            faults += _wrong_arguments(use, facts["parameters"])
    return faults


def _missing_class(use: ClassUse, facts: Mapping[str, Any]) -> Fault:
    because = {
        "module": f"no module named `{facts['name']}`",
        "source": str(facts["name"]),
        "class": f"{facts.get('file')} has no `{facts['name']}`",
    }[facts["missing"]]
    close_matches = difflib.get_close_matches(facts["name"], facts.get("known", ()), n=1)
    remedy = {
        "module": "Correct the path, or start ltui in the folder that contains the module.",
        "source": "Correct the file.",
        "class": f"Did you mean `{close_matches[0]}`?" if close_matches else "Correct the name.",
    }[facts["missing"]]
    message = f"`{use.class_path}` cannot be imported: {because}."
    return Fault(path=f"{use.place}.class_path", what=message, remedy=remedy)


def _wrong_arguments(use: ClassUse, parameters: Mapping[str, str]) -> list[Fault]:
    faults = []
    for name, value in use.init_args.items():
        path = f"{use.place}.init_args.{name}"
        if name not in parameters:
            close_matches = difflib.get_close_matches(str(name), parameters, n=1)
            takes = (
                f"Its arguments: {', '.join(parameters)}." if parameters else "It has no arguments."
            )
            message = f"`{use.class_path}` has no argument of that name."
            remedy = f"Did you mean `{close_matches[0]}`?" if close_matches else takes
            faults.append(Fault(path=path, what=message, remedy=remedy))
        elif not value_fits(value, parameters[name]):
            message = (
                f"must be {_TYPE_WORDS.get(parameters[name], parameters[name])} (got {value!r})."
            )
            faults.append(Fault(path=path, what=message))
    return faults


_TYPE_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def value_fits(value: object, annotation: str) -> bool:
    """Return whether ``value`` can have the annotated type.

    Only numbers and booleans are checked; any other annotation gives True. A string that reads as
    such a value fits, because LightningCLI converts it.
    """
    kinds = {kind.strip() for kind in annotation.split("|")}
    if not kinds <= {"int", "float", "bool", "None"}:
        return True
    if isinstance(value, str):
        try:
            value = parse_value(value)
        except ValueError:
            return False
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in kinds
    if isinstance(value, int):
        return bool(kinds & {"int", "float"})
    return isinstance(value, float) and "float" in kinds
