"""The batch script of a run, and the options that reach sbatch."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.app.slurm.job_nodes import measured_lead_s
from ltui.training.problem import ProblemError
from ltui.training.slurm.batch_script import (
    BatchScript,
    JobOptions,
    check_options,
    parse_extra,
    signal_lead_s,
    time_limit_s,
)
from ltui.training.state.run_snapshot import RankSnapshot, RunSnapshot, RunState

PLAIN = BatchScript(
    run_id="brave-owl-12ab",
    token="t0ken",
    spec_text="version: 1\nid: brave-owl-12ab\n",
    python="/venv/bin/python",
    home="/shared/ltui",
    cwd="/project",
    output="/shared/ltui/runs/brave-owl-12ab/slurm/job-%j.log",
    options=JobOptions(nodes=2, gpus_per_node=8, time="4:00:00", partition="gpu"),
)
PRINTER = """#!/bin/bash
printf '%s\\0' "$@" "LTUI_HOME=$LTUI_HOME" >>"$CALLS"
[ "$4" = prepare ] && cat >"$SPEC"
exit 0
"""
TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
)


def directives(script: str) -> list[str]:
    """The options of the script, as sbatch splits them into words."""
    words = []
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            splitter = shlex.shlex(line.removeprefix("#SBATCH "), posix=True)
            splitter.whitespace_split = True
            # sbatch takes a backslash for an escape within both kinds of quotes.
            splitter.escapedquotes = "\"'"
            words += list(splitter)
    return words


def test_the_script_requests_what_was_asked_for() -> None:
    options = directives(PLAIN.text())
    for expected in (
        "--nodes=2", "--gpus-per-node=8", "--time=4:00:00", "--partition=gpu",
        "--ntasks-per-node=1", "--open-mode=append", "--requeue", "--signal=USR2@180",
        "--job-name=brave-owl-12ab", "--chdir=/project",
    ):  # fmt: skip
        assert expected in options
    assert "srun --ntasks-per-node=1 --kill-on-bad-exit=1" in PLAIN.text()
    assert "--run brave-owl-12ab --token t0ken" in PLAIN.text()
    assert not any(option.startswith("--account") for option in options)


def test_an_option_of_sbatch_replaces_that_of_ltui() -> None:
    options = replace(PLAIN.options, extra=("--output=mine.log", "--qos=high"))
    listed = directives(replace(PLAIN, options=options).text())
    assert [o for o in listed if o.startswith("--output")] == ["--output=mine.log"]
    assert "--qos=high" in listed


@settings(max_examples=25)
@given(home=TEXT, folder=TEXT, spec=TEXT, account=TEXT)
def test_no_value_of_a_user_becomes_code(
    tmp_path_factory: pytest.TempPathFactory, home: str, folder: str, spec: str, account: str
) -> None:
    """The script is run by bash, with a program that prints its arguments instead of python."""
    place = tmp_path_factory.mktemp("script")
    name = folder.replace("/", "_").encode()[:100].decode("utf-8", "ignore") or "x"
    program = place / f"p{name}"
    for path, text in ((program, PRINTER), (place / "srun", "#!/bin/bash\nexit 0\n")):
        path.write_text(text)
        path.chmod(0o700)
    script = replace(
        PLAIN,
        python=str(program),
        home=home,
        spec_text=spec,
        options=replace(PLAIN.options, account=account.splitlines()[0] or "a"),
    )
    job = place / "job.sh"
    job.write_text(script.text(), newline="")
    calls, seen = place / "calls", place / "spec"
    environment = {"PATH": f"{place}:/usr/bin:/bin", "CALLS": str(calls), "SPEC": str(seen)}
    done = subprocess.run(
        ["bash", str(job)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    words = calls.read_bytes().decode().split("\0")
    assert words[0] == "-c"
    assert words[2] == "ltui.app.slurm.job_process"
    assert f"LTUI_HOME={home}" in words
    assert seen.read_bytes().decode().rstrip("\n") == spec.rstrip("\n")
    assert {p.name for p in place.iterdir()} == {"calls", "job.sh", "spec", "srun", program.name}


@pytest.mark.parametrize("field", ["cwd", "output"])
def test_a_line_break_in_the_name_of_a_folder_is_refused(field: str) -> None:
    """Otherwise bash runs the rest of the name."""
    with pytest.raises(ProblemError, match="the value has a line break"):
        replace(PLAIN, **{field: "/project\ntouch code"}).text()


@settings(max_examples=200)
@given(value=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1))
def test_a_value_is_one_option_of_the_script(value: str) -> None:
    extra = parse_extra([f"comment={value}"])
    script = replace(PLAIN, options=replace(PLAIN.options, extra=extra)).text()
    assert f"--comment={value}" in directives(script)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("qos=high", "--qos=high"),
        ("--qos=high", "--qos=high"),
        ("exclusive", "--exclusive"),
        ("comment=a=b c", "--comment=a=b c"),
    ],
)
def test_an_option_of_sbatch(text: str, option: str) -> None:
    assert parse_extra([text]) == (option,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-N2", "not an option of sbatch in its long form"),
        ("", "not an option of sbatch in its long form"),
        ("comment=a\n#SBATCH --uid=0", "not an option of sbatch in its long form"),
        ("nodes=2", "Use --nodes."),
        ("cpus-per-task=4", "Use --cpus-per-node."),
        ("wrap=rm", "set by ltui"),
        ("array=1-3", "set by ltui"),
        ("signal=TERM", "set by ltui"),
    ],
)
def test_an_option_of_sbatch_that_is_refused(text: str, said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        parse_extra([text])


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("4:00:00", 14400),
        ("2-12", 216000),
        ("1-00:30", 88200),
        ("1-00:00:05", 86405),
        ("0", None),
        ("soon", None),
        ("4h", None),
        ("", None),
    ],
)
def test_a_time_limit(text: str, limit: int | None) -> None:
    assert time_limit_s(text) == limit


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(ProblemError, match="not a time limit of SLURM"):
        check_options(JobOptions(time="4h"))
    with pytest.raises(ProblemError, match="--account"):
        check_options(JobOptions(account="a\nb"))


@pytest.mark.parametrize(
    ("checkpoint_s", "step_s", "limit_s", "lead_s"),
    [
        (None, None, None, 180),
        (10.0, 5.0, None, 85),
        (600.0, None, 3600.0, 1260),
        (None, None, 60.0, 30),
        (1e6, None, None, 65535),
    ],
)
def test_when_the_ranks_are_warned(
    checkpoint_s: float | None, step_s: float | None, limit_s: float | None, lead_s: int
) -> None:
    assert signal_lead_s(checkpoint_s, step_s, limit_s) == lead_s


def test_measured_checkpoints_and_steps_make_the_stop_begin_earlier() -> None:
    run = RunSnapshot(id="a-1", name="a", state=RunState.RUNNING)
    assert measured_lead_s(run, None) == 0
    measured = replace(run, checkpoint_seconds=(20.0, 300.0, 30.0))
    assert measured_lead_s(measured, None) == 2 * 300 + 60
    assert measured_lead_s(measured, 900.0) == 450, "a short job trains at all"
    slow = replace(measured, ranks=(RankSnapshot(rank=0, recent_step_s=(1.0, 40.0)),))
    assert measured_lead_s(slow, None) == 2 * 300 + 40 + 60
