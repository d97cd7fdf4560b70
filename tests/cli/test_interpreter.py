"""Which interpreter trains, and what is said of one that can't."""

from __future__ import annotations

import re
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from ltui.app.launch.build_spec import prepare_launch
from ltui.app.launch.training_interpreter import (
    REQUIRED_PACKAGES,
    ClassUse,
    InterpreterReport,
    choose_python,
    class_faults,
    class_uses,
    malicious_packages,
    missing_class_imports,
    missing_packages,
    probe_interpreter,
    value_fits,
)
from ltui.training.problem import ProblemError


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment without packages, whose interpreter is a link."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    return tmp_path / "env"


def test_the_named_interpreter_or_environment_wins_then_the_active_one(environment: Path) -> None:
    active, python = {"VIRTUAL_ENV": str(environment)}, environment / "bin" / "python"
    assert choose_python(sys.executable, active) == sys.executable
    assert choose_python(str(environment), {}) == str(python)
    assert choose_python(None, active) == str(python)
    assert python.is_symlink(), "the link is kept"


def test_without_an_active_environment_our_own_interpreter_trains() -> None:
    if find_spec("torch") is None:
        pytest.skip("this environment holds no torch")
    assert choose_python(None, {"PATH": "/nowhere"}) == sys.executable


@pytest.mark.parametrize("named", ["/nowhere/python", "/etc/passwd"])
def test_what_is_no_program_is_refused(named: str) -> None:
    with pytest.raises(ProblemError, match="--python"):
        choose_python(named, {})


def test_a_program_that_is_no_python_is_refused() -> None:
    with pytest.raises(ProblemError, match="not a working Python"):
        probe_interpreter("/bin/true", ["torch"])


def test_what_an_empty_environment_lacks_is_named_with_the_command(environment: Path) -> None:
    python = str(environment / "bin" / "python")
    seen = probe_interpreter(python, list(REQUIRED_PACKAGES))
    (problem,) = missing_packages(seen, REQUIRED_PACKAGES)
    assert "torch, lightning and jsonargparse" in problem.what
    assert problem.remedy == (
        "Activate the environment that has them, or "
        f"install them with: {python} -m pip install torch lightning 'jsonargparse[signatures]'"
    )


def test_an_old_interpreter_is_told_apart() -> None:
    old = InterpreterReport(python="/old/python", version="3.8.10")
    (problem,) = missing_packages(old, REQUIRED_PACKAGES)
    assert "3.8.10" in problem.what


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_a_malicious_release_is_named(environment: Path, package: str, version: str) -> None:
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / package).mkdir()
    (packages / package / "__init__.py").write_text("raise SystemExit('imported')")
    (packages / f"{package}-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (packages / f"{package}-{version}.dist-info" / "METADATA").write_text(metadata)
    python = str(environment / "bin" / "python")
    (problem,) = malicious_packages(probe_interpreter(python, list(REQUIRED_PACKAGES)))
    assert problem.what == (
        f"{package.replace('_', '-')} {version} is a malicious release (GHSA-w37p-236h-pfx3)."
    )
    with pytest.raises(ProblemError, match="malicious release"):
        prepare_launch("quickstart", [], python)


def test_other_releases_are_not_called_malicious() -> None:
    packages = {"lightning": "2.6.6", "pytorch_lightning": None}
    report = InterpreterReport(python="p", version="3.12.1", packages=packages)
    assert malicious_packages(report) == []


def test_the_requirements_exclude_the_malicious_releases() -> None:
    document = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    named = re.findall(r'"((?:pytorch-)?lightning[>=!][^"]*)"', document)
    assert {name.split(">")[0] for name in named} == {"lightning", "pytorch-lightning"}
    assert all("!=2.6.2" in name and "!=2.6.3" in name for name in named)


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "mine" / "model.py").write_text(
        "import os\n"
        "import nowhere_to_be_found.at_all\n"
        "try:\n    import optional_thing\nexcept ImportError:\n    optional_thing = None\n"
        "class Net:\n    def __init__(self, width: int = 3, *, depth=1):\n        pass\n"
        "class Open:\n    def __init__(self, **anything):\n        pass\n"
    )
    (tmp_path / "mine" / "broken.py").write_text("class Net(:\n")
    return tmp_path


def _looked_up(folder: Path, **class_paths: str) -> InterpreterReport:
    return probe_interpreter(sys.executable, [], class_paths, [str(folder)])


def test_a_class_is_found_without_running_its_package_and_what_it_always_imports_is_needed(
    modules: Path,
) -> None:
    seen = _looked_up(modules, model="mine.model.Net")
    assert seen.classes["model"]["parameters"] == {"width": "int", "depth": ""}
    assert missing_class_imports(seen) == {"nowhere_to_be_found": "nowhere_to_be_found"}
    (problem,) = missing_packages(seen, missing_class_imports(seen))
    assert "nowhere_to_be_found is not installed" in problem.what


@pytest.mark.parametrize(
    ("class_path", "said"),
    [
        ("mien.model.Net", "no module named `mien`"),
        ("mine.models.Net", "no module named `mine.models`"),
        ("mine.model.Nett", "Did you mean `Net`?"),
        ("mine.broken.Net", "SyntaxError"),
    ],
)
def test_a_class_that_cannot_be_imported(modules: Path, class_path: str, said: str) -> None:
    seen = _looked_up(modules, model=class_path)
    (fault,) = class_faults([ClassUse("model", class_path, {})], seen)
    assert said in f"{fault.what} {fault.remedy}"
    assert fault.path == "model.class_path"


def test_an_argument_that_the_class_does_not_take(modules: Path) -> None:
    seen = _looked_up(modules, model="mine.model.Net", other="mine.model.Open")
    uses = [
        ClassUse("model", "mine.model.Net", {"widht": 4, "depth": 2, "width": "many"}),
        ClassUse("other", "mine.model.Open", {"widht": 4}),
    ]
    unknown, wrong = class_faults(uses, seen)
    assert unknown.path == "model.init_args.widht"
    assert unknown.what == "`mine.model.Net` has no argument of that name."
    assert unknown.remedy == "Did you mean `width`?"
    assert wrong.path == "model.init_args.width"
    assert wrong.what == "must be a whole number (got 'many')."


def test_class_paths_are_found_wherever_they_stand() -> None:
    document = {
        "model": {"class_path": "a.B", "init_args": {"inner": {"class_path": "c.D"}}},
        "trainer": {"callbacks": [{"class_path": "e.F"}, {"class_path": "ShortName"}]},
    }
    assert [(u.place, u.class_path) for u in class_uses(document)] == [
        ("model", "a.B"),
        ("model.init_args.inner", "c.D"),
        ("trainer.callbacks.0", "e.F"),
    ]


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, "int", True),
        (3, "float", True),
        ("1e-3", "float", True),
        (3.5, "int", False),
        ("many", "int", False),
        (True, "int", False),
        (None, "int", False),
        (None, "int | None", True),
        ("many", "str", True),
        ("many", "int | str", True),
        ("many", "", True),
        ([1], "float", False),
        ("yes please", "bool", False),
        (1, "bool", False),
    ],
)
def test_values_of_plain_types(value: object, annotation: str, expected: bool) -> None:
    assert value_fits(value, annotation) is expected
