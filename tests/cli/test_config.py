"""``ltui config`` as a person types it: print, edit and check; and what a launch takes from it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import yaml

from ltui.app.launch.launch_defaults import with_launch_defaults
from ltui.app.settings import config_path, write_preference
from ltui.training.config.presets import parse_preset
from tests.cli.conftest import Ltui, RunsLeft
from tests.ltui_command import answer

MISTAKES = """\
theme: ltui-contras
notification: {show: all}
notifications: {shwo: all, seconds: fast, bell: problems}
runs: {columns: [state, 3]}
keys:
  run.stop: d
  run.stp: x
  run.kill: ctl+k
  chart.grid: ctrl+c
  run.maximise: [1, 2.5]
launch:
  stall: {then: restrat}
  restart: 3
"""


def write_config(text: str) -> Path:
    path = config_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


HOSTILE = b"""\
"\\e[31mred": 1
theme: "\\e]0;x\\a"
keys: {"\\e[2J": x, run.stop: "\\e"}
"""


def settings(command: Ltui) -> dict[str, tuple[object, str]]:
    done = command("config", "--json")
    assert done.returncode == 0, done.stderr
    rows = answer(done.stdout)["settings"]
    return {row["key"]: (row["value"], row["origin"]) for row in rows}


def test_each_value_is_printed_with_its_origin_and_the_file_wins(
    command: Ltui, private_home: Path
) -> None:
    (private_home / "runs").mkdir(parents=True)
    assert settings(command)["theme"] == ("ltui-dark", "default")
    write_preference(private_home, "theme", "nord")
    assert settings(command)["theme"] == ("nord", "remembered")
    keys = "keys: {run.stop: [ctrl+s, '#']}"
    write_config(f"# mine\ntheme: ltui-light\n{keys}\nlaunch: {{restarts: 2}}\n")
    printed = settings(command)
    assert printed["theme"] == ("ltui-light", "config.yaml:2")
    assert printed["keys.run.stop"] == (["ctrl+s", "number_sign"], "config.yaml:3")
    assert printed["keys.run.kill"] == ("k", "default")
    assert printed["launch.restarts"] == (2, "config.yaml:4")


def test_what_is_printed_is_a_configuration_file_itself(
    ltui: Ltui, command: Ltui, tmp_path: Path
) -> None:
    write_config("notifications: {bell: problems}\nkeys: {log.level: '#'}\nlaunch: {restarts: 1}\n")
    done = ltui("config")
    assert "number_sign" in done.stdout
    assert "# default: the dashboard decides" in done.stdout
    assert yaml.safe_load(done.stdout)["keys"]["quit"] == "ctrl+q"
    (tmp_path / "copy.yaml").write_text(done.stdout)
    checked = command("config", "--check", "copy.yaml")
    assert checked.returncode == 0, checked.stderr
    write_config("theme: nord\n")
    assert command("config", "--check").stdout.endswith(": no errors, 1 setting.\n")


def test_check_names_every_mistake_with_its_line(command: Ltui) -> None:
    path = write_config(MISTAKES)
    done = command("config", "--check")
    assert done.returncode == 2
    lines = [line.removeprefix(f"{path}:") for line in done.stderr.splitlines()]
    assert sorted(lines, key=lambda line: int(line.split()[0])) == [
        "1 theme: there is no theme `ltui-contras`. Did you mean `ltui-contrast`?",
        "2 notification: unknown key `notification`. Did you mean `notifications`?",
        "3 notifications.shwo: unknown key `shwo`. Did you mean `show`?",
        "3 notifications.seconds: must be a number, 1 or more (got `fast`).",
        "4 runs.columns: must be a list of texts.",
        "6 keys.run.stop: `d` is the key of `run.diagnose` too. "
        "Choose another key, or give `run.diagnose` another one as well.",
        "7 keys.run.stp: unknown action `run.stp`. Did you mean `run.stop`?",
        "8 keys.run.kill: `ctl+k` is not a key. "
        "Keys are written as s, S, f5, ctrl+s, shift+left, space or '?'.",
        "9 keys.chart.grid: `ctrl+c` can't be used: it asks whether to stop the run or to quit. "
        "Choose another key.",
        "10 keys.run.maximise: must be a key or a list of keys (got `[1, 2.5]`). "
        "Write it in quotes, such as 'ctrl+s', or [s, f5].",
        "12 launch.stall.then: must be one of nothing, stop, restart (got `restrat`). "
        "Did you mean `restart`?",
        "13 launch.restart: unknown key `restart`. Did you mean `restarts`?",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"theme: [1\n", "2: invalid YAML: "),
        (b"- theme\n", ": the file is not a mapping of keys."),
        (b"theme: a\ntheme: b\n", "2 theme: duplicate key."),
        (b"theme: \xff\n", ": the file is not UTF-8 text."),
        (b"theme: '\x07'\n", "it contains '\\x07', which is not allowed."),
        (HOSTILE, "unknown key `red`"),
        (b"theme: !!python/object/apply:os.abort []\n", "could not determine a constructor"),
        (b"#" * (1 << 21), "config.yaml: too large for a configuration."),
    ],
    ids=range(8),
)
def test_a_damaged_file_is_named_and_cannot_control_the_terminal(
    command: Ltui, content: bytes, message: str
) -> None:
    write_config("").write_bytes(content)
    for line in ("config --check", "config", "config --json"):
        done = command(*line.split())
        assert done.returncode == 2
        assert message in done.stderr
        assert (done.stdout + done.stderr).replace("\n", "").isprintable()


def test_a_folder_and_a_missing_file_are_named(command: Ltui, tmp_path: Path) -> None:
    for path, message in (
        (str(tmp_path), "this is not a file."),
        ("nowhere.yaml", "no such file."),
    ):
        done = command("config", "--check", path)
        assert (done.returncode, done.stderr.startswith(f"{path}: {message}")) == (2, True)


def editor_that(writes: str) -> str:
    """Return a command that appends a text to the file it is given."""
    code = f"import sys; open(sys.argv[-1], 'a').write({writes!r})"
    return shlex.join([sys.executable, "-c", code])


def test_edit_opens_a_template_and_checks_what_was_written(command: Ltui) -> None:
    done = command("config", "--edit", env={"EDITOR": editor_that("")})
    assert done.returncode == 0, done.stderr
    template = config_path().read_text()
    assert "# theme: " in template
    assert all(line.startswith("#") for line in template.splitlines() if line)
    env = {"EDITOR": "false", "VISUAL": editor_that("theme: nrod\n")}
    done = command("config", "--edit", env=env)
    assert done.returncode == 2
    assert "there is no theme `nrod`. Did you mean `nord`?" in done.stderr
    # Each setting of the template is a valid one.
    write_config(template[template.index("\n\n") :].replace("\n# ", "\n"))
    done = command("config", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("editor", "said"),
    [
        ("no-such-editor -w", "EDITOR: no executable program `no-such-editor` was found."),
        ("false", "false: the editor ended with exit code 1."),
    ],
)
def test_an_editor_that_is_missing_or_fails_is_named(command: Ltui, editor: str, said: str) -> None:
    done = command("config", "--edit", env={"VISUAL": "", "EDITOR": editor})
    assert done.returncode == 2
    assert said in done.stderr


LAUNCH = """\
launch:
  restarts: 4
  mirror: tensorboard
  freeze: true
  stall: {then: stop, on_verdict: ["true", ltui]}
  checkpoint: {every_s: 600}
"""
PRESET = """\
trainer: {max_epochs: 1}
model: {class_path: my.Model}
ltui: {stall: {then: nothing}, checkpoint: {keep: 5}}
"""


@pytest.mark.usefixtures("ends_its_runs")
def test_a_command_starts_with_the_defaults_and_options_win(ltui: Ltui, private_home: Path) -> None:
    write_config(LAUNCH)
    done = ltui("exec", "--restarts", "1", "--keep-best", "val/loss", "--", "true")
    assert done.returncode == 0, done.stderr
    (run,) = (private_home / "runs").iterdir()
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    assert spec["restarts"] == 1
    assert spec["stall"]["then"] == "stop"
    assert spec["stall"]["on_verdict"] == ["true", "ltui"]
    assert spec["checkpoint"]["every_s"] == 600
    assert spec["checkpoint"]["best"] == "val/loss"
    assert (run / "code" / "frozen-1").is_dir()
    assert done.stdout.startswith("The code is frozen: ")
    assert ltui("exec", "--no-freeze", "--name", "not", "--", "true").returncode == 0
    (other,) = (private_home / "runs").glob("not-*")
    assert not (other / "code" / "frozen-1").exists()


def test_a_run_does_not_start_without_the_defaults_that_the_file_asks_for(
    command: Ltui, runs_left: RunsLeft
) -> None:
    write_config("theme: [1]\nlaunch: {stall: {then: restrat}}\n")
    for line in ("exec -- true", "run quickstart"):
        done = command(*line.split())
        assert done.returncode == 2
        assert ":2 launch.stall.then: must be one of nothing, stop, restart" in done.stderr
    assert runs_left() == []


def test_a_preset_wins_over_the_defaults() -> None:
    write_config(LAUNCH)
    preset = with_launch_defaults(parse_preset(PRESET, name="mine"))
    assert preset.stall.then == "nothing"
    assert preset.stall.on_verdict == ("true", "ltui")
    assert (preset.checkpoint.keep, preset.checkpoint.every_s) == (5, 600)
    assert (preset.restarts, preset.mirror, preset.freeze) == (4, "tensorboard", True)
    assert with_launch_defaults(preset) == preset
