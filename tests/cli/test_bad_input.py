"""Bad input: each a sentence that names place and remedy, exit code 2, and no run left behind."""

from __future__ import annotations

import shlex
import sqlite3
import sys
import venv
from pathlib import Path

import pytest

from ltui.app import cli
from ltui.training.config.run_spec import RunSpec
from ltui.training.store.recorded_environment import record_environment
from ltui.training.store.run_directory import RunDir
from tests.cli.conftest import Ltui, RunsLeft
from tests.ltui_command import answer
from tests.stored_runs import stored_run

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


def refused(command: Ltui, *words: str, lines: int = 1, env: dict[str, str] | None = None) -> str:
    """What is said, in so many lines, of a command line that must be refused."""
    done = command(*words, env=env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    assert done.stderr.count("\n") == lines
    return done.stderr


WHOLE = "is not a whole number"
BORING = "lightning.pytorch.demos.boring_classes.Boring"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rnus", "Did you mean `runs`?"),
        ("kill", "Did you mean `stop --kill`?"),
        ("run", "PRESET|FILE"),
        ("stop x --timeout -1", "not a positive number of seconds"),
        ("stop x --timeout nan", "not a positive number of seconds"),
        ("logs x --rank one", WHOLE),
        ("logs x --rank gpu-b:one", WHOLE),
        ("logs x --rank :1", WHOLE),
        ("logs x --rank '\x1b[31m\x1b]0;x\x07'", WHOLE),
        ("export last", "there is no run yet"),
        ("runs --jsn", "--jsn"),
        ("export x --to cvs", "Did you mean `csv`?"),
        ("stop x --when 'val/loss<0.2' --cancel", "--cancel: it cancels every"),
        ("stop x --at-step 7 --cancel", "--cancel: it cancels every"),
        ("exec", "the command is missing"),
        ("exec --", "the command is missing"),
        ("exec -- no-such-program-here", "no executable program of that name"),
        ("exec --python /nowhere -- true", "--python /nowhere"),
        ("exec --name last -- true", "cannot name a run"),
        ("exec --tag 'a b' -- true", "--tag: 'a b' cannot be a tag."),
        ("exec --on-stall restrat:2 -- true", "Did you mean `restart`? See"),
        ("exec --on-stall stop:2 -- true", "is not a valid choice"),
        ("exec --freeze --no-freeze -- true", "not allowed with argument --freeze"),
        ("exec --on-verdict http:// -- true", "a webhook's URL"),
        ("exec --on-verdict no-such-program-here -- true", "no program of that name"),
        ("exec --gpus 2 -- true", "the value must be free:N"),
        ("exec --gpus free:0 -- true", "the value must be free:N"),
        ("run quickstart --gpus 2", "Add --queue"),
        ("run quickstart --queue --gpus 0", "the value must be N or free:N of 1 or more"),
        ("exec --gpus all -- true", "the value must be free:N"),
        ("exec --gpus free:9999 -- true", "this machine has"),
        ("run quickstart --queue --gpus 9999", "--gpus 9999: "),
        ("sweep --gpus 9999 --set lr=choice(1,2) --metric x -- true", "this machine has"),
        ("exec --num-nodes 0 -- true", "`0` is not a whole number of 1 or more"),
        (
            "exec --nodes a --num-nodes 3 -- true",
            "the number of nodes differs: --nodes gives 2 and --num-nodes gives 3. Give it once",
        ),
        ("join here", "'here' is not HOST:PORT. Write it as node 0 prints it"),
        ("", "ltui: the dashboard needs a terminal."),
        ("--readonly", "ltui: the dashboard needs a terminal."),
        ("attach", "ltui: the dashboard needs a terminal."),
        ("demo gpus", "the demo needs a terminal"),
        ("demo nodes", "the demo needs a terminal"),
        ("data info absent.beton", "absent.beton: it can't be read"),
        ("data build x -o x.beton --page-size 3", "the page size must be 2, 4, 8"),
        ("data build x -o nowhere/x.beton", "the folder does not exist"),
        ("run quickstart --nodes ''", "--nodes: no machine is named. Give the names"),
        ("run quickstart --nodes ' , '", "--nodes: no machine is named. Give the names"),
        ("run quickstart --nodes a,a", "a host is named twice. Name each machine once"),
        ("run quickstart --nodes a,-oProxyCommand=x", "is not the name of a host"),
        ("run quickstart --nodes localhost", "there is no machine besides this one"),
        (
            "run quickstart --nodes a --set trainer.num_nodes=3",
            "these are 2 machines with this one, but trainer.num_nodes is 3. Leave out",
        ),
        ("run quickstart --set trainer.max_epoch=3", "Did you mean `trainer.max_epochs`?"),
        ("run quickstart --set trainer.max_epochs=many", "--set trainer.max_epochs"),
        ("run quickstart --set max_epochs", "KEY=VALUE"),
        ("run quickstart --set ltui.checkpoint.every_s=5", "cannot be set on the command line"),
        ("run quickstart --set data.init_args.batch_size=many", "must be a whole number"),
        ("run quickstart --set model.init_args.learning_rat=1", "Did you mean `learning_rate`?"),
        ("run quickstart --set model.class_path=nowhere.Model", "no module named `nowhere`"),
        (f"run quickstart --set model.class_path={BORING}", "BoringModel"),
        (
            "run quickstart --set trainer.accelerator=gpu --set trainer.devices=64",
            "--set trainer.",
        ),
        ("run quickstart --set trainer.devices=4000", "--set trainer.devices"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    command: Ltui, runs_left: RunsLeft, line: str, said: str
) -> None:
    assert said in refused(command, *shlex.split(line))
    assert runs_left() == []


def test_all_mistakes_are_said_at_once(command: Ltui, tmp_path: Path, runs_left: RunsLeft) -> None:
    text = GOOD.replace("max_epochs", "max_epoch").replace("devices: 1", "devices: [a]")
    (tmp_path / "my.yaml").write_text(text)
    error = refused(command, "run", "my.yaml", "--detach", lines=2)
    assert "my.yaml:2 trainer.max_epoch" in error
    assert "my.yaml:3 trainer.devices" in error
    assert runs_left() == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("quikstart", None, "Did you mean `quickstart`?"),
        ("conf/my.yaml", None, "no such file"),
        (".", None, "this is a folder"),
        ("broken.yaml", b"trainer:\n  max_epochs: [1\nmodel: }\n", "broken.yaml:3: invalid YAML"),
        ("binary.yaml", b"\xff\xfe\x00trainer", "not UTF-8 text"),
        ("list.yaml", b"- 1\n- 2\n", "A configuration has the keys"),
        ("empty.yaml", b"", "A configuration has the keys"),
    ],
)
def test_a_preset_that_cannot_be_read(
    command: Ltui, tmp_path: Path, runs_left: RunsLeft, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for word in ("run", "check"):
        error = refused(command, word, name)
        assert said in error
        assert error.startswith(name)
    assert runs_left() == []


@pytest.mark.parametrize("home", ["file", "file/home", "/proc/nowhere/home"])
def test_a_home_that_cannot_be_written(command: Ltui, tmp_path: Path, home: str) -> None:
    (tmp_path / "file").write_text("")
    for line in ("run quickstart --detach", "runs", "exec -- true"):
        error = refused(command, *line.split(), env={"LTUI_HOME": str(tmp_path / home)})
        assert "cannot be written" in error
        assert "Set LTUI_HOME" in error


@pytest.mark.parametrize("way", ["--python", "VIRTUAL_ENV"])
def test_an_interpreter_without_torch_is_named_with_the_command_that_installs_it(
    command: Ltui, tmp_path: Path, runs_left: RunsLeft, way: str
) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    words = ["--python", python] if way == "--python" else []
    env = {} if words else {way: str(tmp_path / "env")}
    error = refused(command, "run", "quickstart", "--detach", *words, env=env)
    assert error.startswith(f"{python}: ")
    assert "not installed" in error
    assert f"{python} -m pip install" in error
    for package in ("torch", "lightning", "jsonargparse", "scikit-learn"):
        assert package in error
    assert runs_left() == []


def fake_run(home: Path, run_id: str) -> RunDir:
    """A run's directory as a launch would have made it, with nothing in it yet."""
    run_dir = RunDir(home / "runs" / run_id)
    for name in ("logs", "queue", "engine", "checkpoints"):
        (run_dir.path / name).mkdir(parents=True)
    spec = RunSpec(
        id=run_id,
        name=run_id[:-5],
        created_at=1.0,
        cwd=str(home),
        python=sys.executable,
        command=("true",),
    )
    run_dir.write_spec(spec)
    return run_dir


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("show brave-owk", "brave-owk: there is no such run. Did you mean brave-owl-3f2a?\n"),
        ("stop brave-owk", "brave-owk: there is no such run. Did you mean brave-owl-3f2a?\n"),
        ("resume brave-owk", "brave-owk: there is no such run. Did you mean brave-owl-3f2a?\n"),
        ("export brave-owk", "brave-owk: there is no such run. Did you mean brave-owl-3f2a?\n"),
        ("show calm", "several runs match: "),
        ("stop brave-owl", "it is not running"),
        ("pause brave-owl", "it is not running"),
        ("continue brave-owl", "it is not running"),
        ("checkpoint brave-owl", "it is not running"),
        ("resume brave-owl", "nothing to resume from"),
        (
            "export brave-owl -o /proc/nowhere/x.csv",
            "3f2a: the run has no history yet. `ltui show",
        ),
    ],
)
def test_a_run_that_is_missing_ambiguous_or_ended(
    command: Ltui, private_home: Path, line: str, said: str
) -> None:
    for run_id in ("brave-owl-3f2a", "calm-fox-0001", "calm-fox-0002"):
        fake_run(private_home, run_id)
    error = refused(command, *line.split())
    assert said in error
    if said == "it is not running":
        assert "cannot be resumed" in error
        assert "ltui resume" not in error


def test_a_refused_resume_warns_of_nothing(
    monkeypatch: pytest.MonkeyPatch, command: Ltui, private_home: Path
) -> None:
    run_dir = fake_run(private_home, "brave-owl-3f2a")
    run_dir.recorded_environment_path(1).parent.mkdir(exist_ok=True)
    record_environment(run_dir, 1)
    monkeypatch.setenv("STEPS", "300")
    assert "nothing to resume from" in refused(command, "resume", "brave-owl")


def test_too_little_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch, command: Ltui) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cli, "_run_command", fail)
    done = command("runs")
    assert done.returncode == 1
    assert done.stderr == "There is not enough memory. Raise the limit (ulimit -v) or free some.\n"


def newer_store(run_dir: RunDir) -> None:
    with sqlite3.connect(run_dir.db_path) as store:
        store.execute("PRAGMA user_version = 99")
    store.close()


def test_a_store_from_a_newer_version(command: Ltui, private_home: Path) -> None:
    run_dir = fake_run(private_home, "brave-owl-3f2a")
    newer_store(run_dir)
    before = run_dir.db_path.read_bytes()
    error = refused(command, "export", "last")
    assert "written by a newer ltui" in error
    assert "Upgrade ltui" in error
    # What the other files tell is shown all the same.
    shown = [line for line in command("show", "last").stdout.splitlines() if "newer ltui" in line]
    assert len(shown) == 1
    assert "Upgrade ltui" in shown[0]
    assert run_dir.db_path.read_bytes() == before


def test_one_damaged_run_does_not_hide_the_others(command: Ltui, private_home: Path) -> None:
    newer_store(fake_run(private_home, "new-owl-3f2a"))
    fake_run(private_home, "calm-fox-0001")
    fake_run(private_home, "torn-elk-0001").spec_path.write_text("\x00{")
    done = command("runs", "--json")
    assert done.returncode == 0
    states = {head["id"]: head["state_word"] for head in answer(done.stdout)}
    assert states["torn-elk-0001"] == "damaged"
    assert states.keys() == {"calm-fox-0001", "new-owl-3f2a", "torn-elk-0001"}
    (line,) = [line for line in command("runs").stdout.splitlines() if "torn-elk-0001" in line]
    assert "damaged" in line
    assert "cannot be read" in line


@pytest.mark.parametrize("word", ["export", "diagnose"])
def test_a_file_is_replaced_only_with_force(
    command: Ltui, private_home: Path, tmp_path: Path, word: str
) -> None:
    stored_run(private_home, "calm-fox-1a2b", metrics={"val/loss": 0.5})
    file = tmp_path / "mine.txt"
    file.write_text("mine")
    assert refused(command, word, "calm-fox", "-o", file.name).endswith(
        "-o mine.txt: the file exists already. Replace it with --force, or choose another name.\n"
    )
    assert file.read_text() == "mine"
    assert command(word, "calm-fox", "-o", file.name, "--force").returncode == 0
    assert file.read_text() != "mine"
    assert command(word, "calm-fox", "-o", "/dev/null").returncode == 0
    full = command(word, "calm-fox", "-o", "/dev/full")
    assert (full.returncode, "-o /dev/full: the file cannot be written" in full.stderr) == (2, True)


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
