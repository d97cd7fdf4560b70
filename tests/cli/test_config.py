"""``ltui config`` as a person types it: print, edit and check; and what a launch takes from it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from ltui.app.settings import config_path, write_preference
from tests.cli.conftest import Ltui

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


def settings(ltui: Ltui) -> dict[str, tuple[object, str]]:
    done = ltui("config", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["settings"]
    return {row["key"]: (row["value"], row["origin"]) for row in rows}


def test_each_value_is_printed_with_its_origin_and_the_file_wins(
    ltui: Ltui, private_home: Path
) -> None:
    (private_home / "runs").mkdir(parents=True)
    assert settings(ltui)["theme"] == ("ltui-dark", "default")
    write_preference(private_home, "theme", "nord")
    assert settings(ltui)["theme"] == ("nord", "remembered")
    keys = "keys: {run.stop: [ctrl+s, '#']}"
    write_config(f"# mine\ntheme: ltui-light\n{keys}\nlaunch: {{restarts: 2}}\n")
    printed = settings(ltui)
    assert printed["theme"] == ("ltui-light", "config.yaml:2")
    assert printed["keys.run.stop"] == (["ctrl+s", "number_sign"], "config.yaml:3")
    assert printed["keys.run.kill"] == ("k", "default")
    assert printed["launch.restarts"] == (2, "config.yaml:4")


def test_what_is_printed_is_a_configuration_file_itself(ltui: Ltui, tmp_path: Path) -> None:
    write_config("notifications: {bell: problems}\nkeys: {log.level: '#'}\nlaunch: {restarts: 1}\n")
    done = ltui("config")
    assert "number_sign" in done.stdout
    copy = tmp_path / "copy.yaml"
    copy.write_text(done.stdout)
    checked = ltui("config", "--check", str(copy))
    assert checked.returncode == 0, checked.stderr
    write_config("theme: nord\n")
    assert ltui("config", "--check").stdout.endswith(": no errors, 1 setting.\n")
    assert "# default: the dashboard decides" in done.stdout
    assert yaml.safe_load(done.stdout)["keys"]["quit"] == "ctrl+q"


def test_check_names_every_mistake_with_its_line(ltui: Ltui) -> None:
    path = write_config(MISTAKES)
    done = ltui("config", "--check")
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
        (b"theme: !!python/object/apply:os.abort []\n", "could not determine a constructor"),
    ],
)
def test_a_damaged_file_is_named(ltui: Ltui, content: bytes, message: str) -> None:
    path = write_config("")
    path.write_bytes(content)
    for words in (["config", "--check"], ["config"]):
        done = ltui(*words)
        assert done.returncode == 2
        assert message in done.stderr
        assert "\x07" not in done.stderr


def test_control_characters_of_the_file_do_not_reach_the_terminal(ltui: Ltui) -> None:
    write_config('"\\e[31mred": 1\ntheme: "\\e]0;x\\a"\nkeys: {"\\e[2J": x, run.stop: "\\e"}\n')
    for words in (["config", "--check"], ["config"], ["config", "--json"]):
        done = ltui(*words)
        assert done.returncode == 2
        assert "unknown key `red`" in done.stderr
        assert (done.stdout + done.stderr).replace("\n", "").isprintable()


def test_a_folder_a_missing_file_and_a_large_one_are_named(ltui: Ltui, tmp_path: Path) -> None:
    large = write_config("#" * (1 << 21))
    assert f"{large}: too large for a configuration." in ltui("config", "--check").stderr
    assert "this is not a file." in ltui("config", "--check", str(tmp_path)).stderr
    missing = ltui("config", "--check", "nowhere.yaml")
    assert missing.returncode == 2
    assert "nowhere.yaml: no such file." in missing.stderr


def editor_that(writes: str) -> str:
    """Return a command that appends a text to the file it is given."""
    code = f"import sys; open(sys.argv[-1], 'a').write({writes!r})"
    return shlex.join([sys.executable, "-c", code])


def test_edit_opens_a_template_and_checks_what_was_written(ltui: Ltui) -> None:
    done = ltui("config", "--edit", env={"EDITOR": editor_that("")})
    assert done.returncode == 0, done.stderr
    template = config_path().read_text()
    assert "# theme: " in template
    assert all(line.startswith("#") for line in template.splitlines() if line)
    done = ltui("config", "--edit", env={"EDITOR": "false", "VISUAL": editor_that("theme: nrod\n")})
    assert done.returncode == 2
    assert "there is no theme `nrod`. Did you mean `nord`?" in done.stderr


def test_each_line_of_the_template_is_valid(ltui: Ltui) -> None:
    ltui("config", "--edit", env={"EDITOR": editor_that("")})
    text = config_path().read_text()
    prose = text.index("\n\n")
    used = text[prose:].replace("\n# ", "\n")
    write_config(used)
    done = ltui("config", "--check")
    assert done.returncode == 0, done.stderr


def test_an_editor_that_is_missing_or_fails_is_named(ltui: Ltui) -> None:
    done = ltui("config", "--edit", env={"VISUAL": "", "EDITOR": "no-such-editor -w"})
    assert done.returncode == 2
    assert "EDITOR: no executable program `no-such-editor` was found." in done.stderr
    done = ltui("config", "--edit", env={"VISUAL": "", "EDITOR": "false"})
    assert done.returncode == 2
    assert "false: the editor ended with exit code 1." in done.stderr


LAUNCH = """\
launch:
  restarts: 4
  mirror: tensorboard
  stall: {then: stop, on_verdict: ["true", ltui]}
  checkpoint: {every_s: 600}
"""
PRESET = """\
trainer: {max_epochs: 1}
model: {class_path: my.Model}
ltui: {stall: {then: nothing}, checkpoint: {keep: 5}}
"""


def started_spec(ltui: Ltui, *words: str) -> dict[str, object]:
    done = ltui("exec", *words, "--", sys.executable, "-c", "pass")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(ltui("runs", "--json").stdout)
    folder = Path(os.environ["LTUI_HOME"]) / "runs" / run["id"]
    spec: dict[str, object] = yaml.safe_load((folder / "spec.yaml").read_text())
    return spec


@pytest.mark.usefixtures("ends_its_runs")
def test_a_command_starts_with_the_defaults_and_options_win(ltui: Ltui) -> None:
    write_config(LAUNCH)
    spec = started_spec(ltui, "--restarts", "1", "--keep-best", "val/loss")
    assert spec["restarts"] == 1
    assert spec["stall"]["then"] == "stop"  # type: ignore[index]
    assert spec["stall"]["on_verdict"] == ["true", "ltui"]  # type: ignore[index]
    assert spec["checkpoint"]["every_s"] == 600  # type: ignore[index]
    assert spec["checkpoint"]["best"] == "val/loss"  # type: ignore[index]


def test_a_run_does_not_start_without_the_defaults_that_the_file_asks_for(
    ltui: Ltui, runs_left: object
) -> None:
    write_config("theme: [1]\nlaunch: {stall: {then: restrat}}\n")
    for words in (["exec", "--", "true"], ["run", "quickstart"]):
        done = ltui(*words)
        assert done.returncode == 2
        assert ":2 launch.stall.then: must be one of nothing, stop, restart" in done.stderr
    assert json.loads(ltui("runs", "--json").stdout) == []


def test_a_preset_wins_over_the_defaults() -> None:
    from ltui.app.launch.launch_defaults import with_launch_defaults
    from ltui.training.config.presets import parse_preset

    write_config(LAUNCH)
    preset = with_launch_defaults(parse_preset(PRESET, name="mine"))
    assert preset.stall.then == "nothing"
    assert preset.stall.on_verdict == ("true", "ltui")
    assert (preset.checkpoint.keep, preset.checkpoint.every_s) == (5, 600)
    assert (preset.restarts, preset.mirror) == (4, "tensorboard")
    assert with_launch_defaults(preset) == preset
