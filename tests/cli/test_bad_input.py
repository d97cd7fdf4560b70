"""Bad input: each a sentence that names place and remedy, exit code 2, and no run left behind."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.app import cli
from ltui.training.config.run_spec import RunSpec
from ltui.training.store.run_directory import RunDir
from tests.cli.conftest import Ltui
from tests.live_processes import processes_with
from tests.stored_runs import stored_run

RunsLeft = Callable[[], list[str]]

GOOD = """\
trainer:
  max_epochs: 1
  devices: 1
  accelerator: cpu
model:
  class_path: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: lightning.pytorch.demos.boring_classes.BoringDataModule
"""


def refused(ltui: Ltui, *words: str, env: dict[str, str] | None = None) -> str:
    """What is said of a command line that must be refused."""
    done = ltui(*words, env=env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.max_epoch=3"], "Did you mean `trainer.max_epochs`?"),
        (["trainer.max_epochs=many"], "--set trainer.max_epochs"),
        (["max_epochs"], "KEY=VALUE"),
        (["ltui.checkpoint.every_s=5"], "cannot be set on the command line"),
        (["data.init_args.batch_size=many"], "must be a whole number"),
        (["model.class_path=nowhere.Model"], "no module named `nowhere`"),
        (["model.class_path=lightning.pytorch.demos.boring_classes.Boring"], "BoringModel"),
        (["trainer.accelerator=gpu", "trainer.devices=64"], "--set trainer."),
        (["trainer.devices=4000"], "--set trainer.devices"),
    ],
)
def test_a_wrong_override(ltui: Ltui, runs_left: RunsLeft, overrides: list[str], said: str) -> None:
    words = [word for override in overrides for word in ("--set", override)]
    error = refused(ltui, "run", "quickstart", "--detach", *words)
    assert said in error
    assert error.count("\n") == 1
    assert runs_left() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "quickstart", "--nodes", ""], "--nodes: no machine is named. Give the names"),
        (["run", "quickstart", "--nodes", " , "], "--nodes: no machine is named. Give the names"),
        (["run", "quickstart", "--nodes", "a,a"], "a host is named twice. Name each machine once"),
        (["run", "quickstart", "--nodes", "a,-oProxyCommand=x"], "is not the name of a host"),
        (["run", "quickstart", "--nodes", "localhost"], "there is no machine besides this one"),
        (
            ["run", "quickstart", "--nodes", "a", "--set", "trainer.num_nodes=3"],
            "these are 2 machines with this one, but trainer.num_nodes is 3. Leave out",
        ),
        (
            ["exec", "--nodes", "a", "--num-nodes", "3", "--", "true"],
            "the number of nodes differs: --nodes gives 2 and --num-nodes gives 3. Give it once",
        ),
        (["exec", "--num-nodes", "0", "--", "true"], "`0` is not a whole number of 1 or more"),
        (["join", "here"], "'here' is not HOST:PORT. Write it as node 0 prints it"),
    ],
)
def test_a_wrong_list_of_machines(
    ltui: Ltui, runs_left: RunsLeft, private_home: Path, words: list[str], said: str
) -> None:
    error = refused(ltui, *words)
    assert said in error
    assert error.count("\n") == 1
    assert runs_left() == []
    assert processes_with("LTUI_HOME", private_home) == []


def test_all_mistakes_are_said_at_once(ltui: Ltui, tmp_path: Path, runs_left: RunsLeft) -> None:
    text = GOOD.replace("max_epochs", "max_epoch").replace("devices: 1", "devices: [a]")
    (tmp_path / "my.yaml").write_text(text)
    error = refused(ltui, "run", "my.yaml", "--detach")
    assert "my.yaml:2 trainer.max_epoch" in error
    assert "my.yaml:3 trainer.devices" in error
    assert error.count("\n") == 2
    assert runs_left() == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quikstart", "Did you mean `quickstart`?"),
        ("conf/my.yaml", "no such file"),
        ("folder", "this is a folder"),
        ("broken.yaml", "broken.yaml:3: invalid YAML"),
        ("binary.yaml", "not UTF-8 text"),
        ("list.yaml", "A configuration has the keys"),
        ("empty.yaml", "A configuration has the keys"),
    ],
)
def test_a_preset_that_cannot_be_read(
    ltui: Ltui, tmp_path: Path, runs_left: RunsLeft, name: str, said: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.yaml").write_text("trainer:\n  max_epochs: [1\nmodel: }\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00trainer")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "empty.yaml").write_text("")
    for command in ("run", "check"):
        error = refused(ltui, command, name)
        assert said in error
        assert error.startswith(name.removesuffix("/"))
        assert error.count("\n") == 1
    assert runs_left() == []


@pytest.mark.parametrize("kind", ["file", "below a file", "no such place"])
def test_a_home_that_cannot_be_written(ltui: Ltui, tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    home = {
        "file": str(tmp_path / "file"),
        "below a file": str(tmp_path / "file" / "home"),
        "no such place": "/proc/nowhere/home",
    }[kind]
    for words in (["run", "quickstart", "--detach"], ["runs", "--json"], ["exec", "--", "true"]):
        error = refused(ltui, *words, env={"LTUI_HOME": home})
        assert "cannot be written" in error
        assert "Set LTUI_HOME" in error
        assert error.count("\n") == 1


@pytest.fixture
def empty_environment(tmp_path: Path) -> str:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    return str(tmp_path / "env" / "bin" / "python")


def test_an_interpreter_without_torch(
    ltui: Ltui, runs_left: RunsLeft, empty_environment: str
) -> None:
    error = refused(ltui, "run", "quickstart", "--detach", "--python", empty_environment)
    assert "not installed" in error
    assert f"{empty_environment} -m pip install" in error
    for package in ("torch", "lightning", "jsonargparse", "scikit-learn"):
        assert package in error
    assert error.count("\n") == 1
    assert runs_left() == []


def test_the_active_environment_trains_and_is_named(ltui: Ltui, empty_environment: str) -> None:
    active = str(Path(empty_environment).parents[1])
    error = refused(ltui, "run", "quickstart", env={"VIRTUAL_ENV": active})
    assert error.startswith(f"{empty_environment}: ")


def test_an_argument_that_the_class_does_not_take(
    ltui: Ltui, tmp_path: Path, runs_left: RunsLeft
) -> None:
    (tmp_path / "net.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "class Net(BoringModel):\n"
        "    def __init__(self, width: int = 3):\n        super().__init__()\n"
    )
    text = GOOD.replace(
        "lightning.pytorch.demos.boring_classes.BoringModel", "net.Net\n  init_args: {widht: 4}"
    )
    (tmp_path / "my.yaml").write_text(text)
    error = refused(ltui, "run", "my.yaml", "--detach")
    assert "Did you mean `width`?" in error
    assert runs_left() == []


def fake_run(home: Path, run_id: str) -> RunDir:
    """A run's directory as a launch would have made it, with nothing in it yet."""
    run_dir = RunDir(home / "runs" / run_id)
    for name in ("logs", "queue", "engine", "checkpoints"):
        (run_dir.path / name).mkdir(parents=True)
    run_dir.write_spec(
        RunSpec(
            id=run_id,
            name=run_id[:-5],
            created_at=1.0,
            cwd=str(home),
            python=sys.executable,
            command=("true",),
        )
    )
    return run_dir


def test_a_run_that_does_not_exist(ltui: Ltui, private_home: Path) -> None:
    fake_run(private_home, "brave-owl-3f2a")
    for command in ("show", "stop", "resume", "export"):
        error = refused(ltui, command, "brave-owk")
        assert error == "brave-owk: there is no such run. Did you mean brave-owl-3f2a?\n"


def test_what_was_pasted_cannot_control_the_terminal(ltui: Ltui) -> None:
    error = refused(ltui, "logs", "last", "--rank", "\x1b[31m\x1b]0;x\x07")
    assert "\x1b" not in error
    assert "is not a whole number" in error


def test_too_little_memory_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cli, "_run_command", fail)
    assert cli.main(["runs"]) == 1
    assert capsys.readouterr().err == (
        "There is not enough memory. Raise the limit (ulimit -v) or free some.\n"
    )


def test_a_name_that_fits_several(ltui: Ltui, private_home: Path) -> None:
    for run_id in ("calm-fox-0001", "calm-fox-0002"):
        fake_run(private_home, run_id)
    error = refused(ltui, "show", "calm")
    assert "several runs match: " in error
    assert "calm-fox-0001" in error


def newer_store(run_dir: RunDir) -> None:
    with sqlite3.connect(run_dir.db_path) as store:
        store.execute("PRAGMA user_version = 99")
    store.close()


def test_a_store_from_a_newer_version(ltui: Ltui, private_home: Path) -> None:
    run_dir = fake_run(private_home, "brave-owl-3f2a")
    newer_store(run_dir)
    before = run_dir.db_path.read_bytes()
    error = refused(ltui, "export", "last")
    assert "written by a newer ltui" in error
    assert "Upgrade ltui" in error
    assert error.count("\n") == 1
    # What the other files tell is shown all the same.
    (shown,) = [line for line in ltui("show", "last").stdout.splitlines() if "newer ltui" in line]
    assert "Upgrade ltui" in shown
    assert run_dir.db_path.read_bytes() == before


def test_one_damaged_run_does_not_hide_the_others(ltui: Ltui, private_home: Path) -> None:
    newer_store(fake_run(private_home, "new-owl-3f2a"))
    fake_run(private_home, "calm-fox-0001")
    (fake_run(private_home, "torn-elk-0001").spec_path).write_text("\x00{")
    done = ltui("runs", "--json")
    assert done.returncode == 0
    states = {head["id"]: head["state_word"] for head in json.loads(done.stdout)}
    assert states["torn-elk-0001"] == "damaged"
    assert states.keys() == {"calm-fox-0001", "new-owl-3f2a", "torn-elk-0001"}
    (line,) = [line for line in ltui("runs").stdout.splitlines() if "torn-elk-0001" in line]
    assert "damaged" in line
    assert "cannot be read" in line


def test_what_needs_a_living_run_is_refused_for_an_ended_one(
    ltui: Ltui, private_home: Path
) -> None:
    fake_run(private_home, "brave-owl-3f2a")
    for command in ("stop", "pause", "continue", "checkpoint"):
        error = refused(ltui, command, "last")
        assert "it is not running" in error
        assert "cannot be resumed" in error
        assert "ltui resume" not in error
    assert "nothing to resume from" in refused(ltui, "resume", "last")


def test_a_file_is_replaced_only_with_force(
    private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ltui: Ltui
) -> None:
    stored_run(private_home, "calm-fox-1a2b", metrics={"val/loss": 0.5})
    monkeypatch.chdir(tmp_path)
    for command in ("export", "diagnose"):
        file = tmp_path / f"{command}.txt"
        file.write_text("mine")
        done = ltui(command, "calm-fox", "-o", file.name)
        assert done.returncode == 2
        assert done.stderr.strip().endswith(
            f"-o {file.name}: the file exists already. Replace it with --force, or choose "
            "another name."
        )
        assert file.read_text() == "mine"
        assert ltui(command, "calm-fox", "-o", file.name, "--force").returncode == 0
        assert file.read_text() != "mine"
        assert ltui(command, "calm-fox", "-o", "/dev/null").returncode == 0


def test_export_to_where_nothing_can_be_written(
    ltui: Ltui, private_home: Path, tmp_path: Path
) -> None:
    run_dir = fake_run(private_home, "brave-owl-3f2a")
    assert "no history yet" in refused(ltui, "export", "last", "-o", "/proc/nowhere/x.csv")
    shutil.rmtree(run_dir.path)
    assert "there is no run yet" in refused(ltui, "export", "last")


@pytest.mark.timeout(500)
@pytest.mark.slow
def test_the_deep_check_asks_the_real_classes(
    ltui: Ltui, tmp_path: Path, runs_left: RunsLeft
) -> None:
    (tmp_path / "my.yaml").write_text(
        f"{GOOD}optimizer:\n  class_path: torch.optim.SGD\n  init_args:\n    lr: fast\n"
    )
    quick = ltui("check", "my.yaml", "--quick")
    assert quick.returncode == 0, quick.stderr
    assert "The model and data classes were not loaded" in quick.stdout
    error = refused(ltui, "check", "my.yaml")
    assert error.startswith("my.yaml:12 optimizer.init_args.lr: ")
    assert runs_left() == []
