"""The words of the command line: help, values, completion, and what is loaded for them."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ltui.app.command_line.parser import build_parser, whole_number
from ltui.training.state.stop_conditions import parse_condition
from ltui.training.store.history_writer import Batch, StoreWriter
from tests.cli.conftest import Ltui
from tests.stored_runs import stored_run

COMMANDS = """run exec resume submit attach runs show compare diagnose logs export import stop pause
continue checkpoint delete prune tag group note star presets check doctor completion
rerun""".split()  # noqa: SIM905 - a list of words reads better so


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


def test_a_run_has_to_match_every_filter_that_is_given() -> None:
    words = ["--filter", "state=failed", "--filter", "a or b"]
    options = build_parser().parse_args(["prune", *words])
    assert options.filter == "(state=failed) (a or b)"


def test_every_command_has_help(command: Ltui) -> None:
    overview = command("--help").stdout
    for name in COMMANDS:
        assert name in overview
        done = command(name, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith(f"usage: ltui {name}")


@pytest.mark.parametrize(
    ("commands", "heavy"),
    [
        ("--version", ""),
        ("--help / run --help", "msgspec subprocess"),
        ("runs / runs --json / export no-such-run", "yaml subprocess"),
        ("data info no-such-file", "sqlite3"),
    ],
)
def test_a_quick_command_loads_nothing_heavy(commands: str, heavy: str) -> None:
    program = (
        "import sys\nfrom ltui.app.cli import main\n"
        "for words in sys.argv[1].split('/'):\n"
        "    try:\n        main(words.split())\n    except SystemExit:\n        pass\n"
        "print([m for m in sys.argv[2].split() if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, commands, f"torch textual rich lightning {heavy}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


_COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=1000
_shtab_ltui ltui "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
echo "${COMPREPLY[@]}"
"""


def offers(command: Ltui, folder: Path, words: list[str], shell: str = "bash") -> list[str]:
    """Return what a shell offers to complete these words of ``ltui``."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = folder / "completion"
    script.write_text(command("completion", shell).stdout)
    line = f"source {script}; complete -C 'ltui {' '.join(words)}'"
    argv = {
        "bash": ["bash", "-c", _COMPLETE, "bash", str(script), "ltui", *words],
        "fish": ["fish", "--no-config", "-c", line],
    }[shell]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        argv,
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
    ("line", "offered"),
    [
        ("export brave-owl --metric val", "val_loss"),
        ("compare brave-owl --metric val", "val_loss"),
        ("run quickstart --set trainer.max_ep", "trainer.max_epochs="),
        ("resume brave-owl --set trainer.max_ep", "trainer.max_epochs="),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_metrics_and_keys_are_completed(
    command: Ltui, tmp_path: Path, private_home: Path, shell: str, line: str, offered: str
) -> None:
    log_metrics(private_home, "val_loss", "lr")
    assert offers(command, tmp_path, line.split(), shell) == [offered]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("st", "star stop"),
        ("show ", "last brave-owl brave-owl-3f2a"),
        ("logs br", "brave-owl brave-owl-3f2a"),
        ("run quick", "quickstart"),
        ("export last --to ", "csv json parquet tensorboard"),
        ("logs last --fo", "--follow"),
    ],
)
def test_bash_completes(
    command: Ltui, tmp_path: Path, private_home: Path, line: str, offered: str
) -> None:
    (private_home / "runs" / "brave-owl-3f2a").mkdir(parents=True)
    assert set(offers(command, tmp_path, line.split(" "))) == set(offered.split())


@pytest.mark.parametrize(
    ("line", "other"), [("show ", "brave-owl"), ("export brave-owl --metric ", "lr")]
)
def test_bash_neither_runs_nor_offers_what_a_name_contains(
    command: Ltui, tmp_path: Path, private_home: Path, line: str, other: str
) -> None:
    traps = ("$(touch trap)", "`touch trap`", "a;touch trap", "$(touch${IFS}trap)")
    log_metrics(private_home, *traps, "lr")
    for trap in traps:
        (private_home / "runs" / f"{trap}-1234").mkdir()
    offered = offers(command, tmp_path, line.split(" "))
    assert not any("touch" in word for word in offered)
    assert other in offered
    assert not list(tmp_path.rglob("trap"))
    assert not list(private_home.rglob("trap"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_script(command: Ltui, shell: str) -> None:
    done = command("completion", shell)
    assert done.returncode == 0
    assert "checkpoint" in done.stdout
    assert "quickstart" in done.stdout or shell == "tcsh"
