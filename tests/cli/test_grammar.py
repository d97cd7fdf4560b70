"""What the command line says to words that it does not know, and what it loads to say it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ltui.app.commands.parser import whole_number
from ltui.training.state.stop_conditions import parse_condition
from ltui.training.store.history_writer import Batch, StoreWriter
from tests.cli.conftest import Ltui
from tests.stored_runs import stored_run

COMMANDS = """run exec resume submit attach runs show compare diagnose logs export import stop pause
continue checkpoint delete prune tag group note star presets check doctor completion""".split()  # noqa: SIM905 - a list of words reads better so


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnus"], "Did you mean `runs`?"),
        (["run"], "PRESET|FILE"),
        (["stop", "x", "--timeout", "-1"], "not a positive number of seconds"),
        (["stop", "x", "--timeout", "nan"], "not a positive number of seconds"),
        (["logs", "x", "--rank", "one"], "not a whole number"),
        (["logs", "x", "--rank", "gpu-b:one"], "not a whole number"),
        (["logs", "x", "--rank", ":1"], "not a whole number"),
        (["runs", "--jsn"], "--jsn"),
        (["export", "x", "--to", "cvs"], "Did you mean `csv`?"),
        (["stop", "x", "--when", "val/loss<0.2", "--cancel"], "--cancel: it cancels every"),
        (["stop", "x", "--at-step", "7", "--cancel"], "--cancel: it cancels every"),
        (["exec"], "the command is missing"),
        (["exec", "--"], "the command is missing"),
        (["exec", "--", "no-such-program-here"], "no executable program of that name"),
        (["exec", "--python", "/nowhere", "--", "true"], "--python /nowhere"),
        (["exec", "--name", "last", "--", "true"], "cannot name a run"),
        (["exec", "--on-stall", "restrat:2", "--", "true"], "Did you mean `restart`?"),
        (["exec", "--on-stall", "stop:2", "--", "true"], "is not a valid choice"),
        (["exec", "--on-verdict", "http://", "--", "true"], "a webhook's URL"),
        (["exec", "--on-verdict", "no-such-program-here", "--", "true"], "no program of that name"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(ltui: Ltui, words: list[str], said: str) -> None:
    done = ltui(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["3157", "3 157", "3,157", "3_157", "3\N{THIN SPACE}157", "3\N{NO-BREAK SPACE}157"]
)
def test_a_step_can_be_pasted_from_the_screen(text: str) -> None:
    assert whole_number(text) == 3157
    assert parse_condition(text, 0.0).step == 3157


@pytest.mark.parametrize("text", ["31 57", "3 1570", "1,5", "-3", "3 157.0", ""])
def test_what_is_no_grouped_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        whole_number(text)


def test_the_dashboard_needs_a_terminal_and_says_so(ltui: Ltui) -> None:
    for words in ([], ["--readonly"], ["attach"]):
        done = ltui(*words)
        assert done.returncode == 2
        assert done.stderr.startswith("ltui: the dashboard needs a terminal.")


def test_every_command_has_help(ltui: Ltui) -> None:
    overview = ltui("--help").stdout
    for command in COMMANDS:
        assert command in overview
        done = ltui(command, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith(f"usage: ltui {command}")


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--version"], ()),
        (["--help"], ("msgspec", "subprocess")),
        (["run", "--help"], ("msgspec", "subprocess")),
        (["runs"], ("yaml", "subprocess")),
        (["runs", "--json"], ("yaml", "subprocess")),
        (["export", "no-such-run"], ("yaml", "subprocess")),
        (["data", "info", "no-such-file"], ("sqlite3",)),
    ],
)
def test_a_quick_command_loads_nothing_heavy(words: list[str], heavy: tuple[str, ...]) -> None:
    program = (
        "import sys\nfrom ltui.app.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"heavy = {('torch', 'textual', 'rich', 'lightning', *heavy)}\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


_COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=1000
_shtab_ltui ltui "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
echo "${COMPREPLY[@]}"
"""


def offers(ltui: Ltui, folder: Path, words: list[str], shell: str = "bash") -> list[str]:
    """Return what a shell offers to complete these words of ``ltui``."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = folder / "completion"
    script.write_text(ltui("completion", shell).stdout)
    line = f"source {script}; complete -C 'ltui {' '.join(words)}'"
    command = {
        "bash": ["bash", "-c", _COMPLETE, "bash", str(script), "ltui", *words],
        "fish": ["fish", "--no-config", "-c", line],
    }[shell]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env={**os.environ, "PATH": path},
    )
    assert done.stdout, done.stderr
    found = [line.partition("\t")[0].strip() for line in done.stdout.splitlines()]
    return [word for line in found for word in line.split()] if shell == "bash" else found


def log_metrics(home: Path, *names: str) -> None:
    """Store a run that has logged metrics of these names."""
    writer = StoreWriter(stored_run(home, "brave-owl-3f2a").db_path)
    logged = enumerate(names)
    writer.commit(1, Batch(samples=[(0, seq, name, 1, 0, 1.0, 0.5) for seq, name in logged]))
    writer.close()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["export", "brave-owl", "--metric", "val"], "val_loss"),
        (["compare", "brave-owl", "--metric", "val"], "val_loss"),
        (["run", "quickstart", "--set", "trainer.max_ep"], "trainer.max_epochs="),
        (["resume", "brave-owl", "--set", "trainer.max_ep"], "trainer.max_epochs="),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_metrics_and_keys_are_completed(
    ltui: Ltui, tmp_path: Path, private_home: Path, shell: str, words: list[str], offered: str
) -> None:
    log_metrics(private_home, "val_loss", "lr")
    assert offers(ltui, tmp_path, words, shell) == [offered]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["st"], {"star", "stop"}),
        (["show", ""], {"last", "brave-owl", "brave-owl-3f2a"}),
        (["logs", "br"], {"brave-owl", "brave-owl-3f2a"}),
        (["run", "quick"], {"quickstart"}),
        (["export", "last", "--to", ""], {"csv", "json", "parquet", "tensorboard"}),
        (["logs", "last", "--fo"], {"--follow"}),
    ],
)
def test_bash_completes(
    ltui: Ltui, tmp_path: Path, private_home: Path, words: list[str], offered: set[str]
) -> None:
    (private_home / "runs" / "brave-owl-3f2a").mkdir(parents=True)
    assert set(offers(ltui, tmp_path, words)) == offered


@pytest.mark.parametrize("words", [["show", ""], ["export", "brave-owl", "--metric", ""]])
@pytest.mark.parametrize(
    "trap", ["$(touch trap)", "`touch trap`", "a;touch trap", "$(touch${IFS}trap)"]
)
def test_bash_neither_runs_nor_offers_what_a_name_contains(
    ltui: Ltui, tmp_path: Path, private_home: Path, words: list[str], trap: str
) -> None:
    log_metrics(private_home, trap, "lr")
    (private_home / "runs" / f"{trap}-1234").mkdir()
    offered = offers(ltui, tmp_path, words)
    assert not any("touch" in word for word in offered)
    assert ("lr" if "--metric" in words else "brave-owl") in offered
    assert not list(tmp_path.rglob("trap"))
    assert not list(private_home.rglob("trap"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_script(ltui: Ltui, shell: str) -> None:
    done = ltui("completion", shell)
    assert done.returncode == 0
    assert "checkpoint" in done.stdout
    assert "quickstart" in done.stdout or shell == "tcsh"
