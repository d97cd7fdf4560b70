"""The details of a run: settings, where it was started from, whose checkpoints."""

from __future__ import annotations

from msgspec.structs import replace

from ltui.app.presentation import run_details, run_view
from ltui.app.presentation.run_configuration import settings
from ltui.training.config.run_spec import RunSpec
from ltui.training.state.run_snapshot import CheckpointInfo, JobSnapshot, RunState
from tests.app.frames import NOW, curve, frame, snapshot

SPEC = RunSpec(
    id="brave-owl-3f2a",
    name="brave-owl",
    created_at=NOW,
    cwd="/home/me",
    python="/venv/bin/python",
    preset="quickstart",
    start_from="old-pine-11aa:4500",
    config={
        "seed_everything": True,
        "trainer": {"max_epochs": 30, "logger": None, "callbacks": [], "run_name": ""},
        "model": {"class_path": "my.models.Digits", "init_args": {"learning_rate": 0.002}},
    },
)


def test_settings_are_the_leaves_under_short_names() -> None:
    assert settings(SPEC) == [
        ("seed_everything", "true"),
        ("trainer.max_epochs", "30"),
        ("trainer.callbacks", "[]"),
        ("trainer.run_name", "''"),
        ("model", "Digits"),
        ("model.learning_rate", "0.002"),
    ]
    exec_spec = replace(SPEC, config=None, command=("python", "train.py", "--name", "a b"))
    assert settings(exec_spec) == [("command", "python train.py --name 'a b'")]


def test_figures_name_the_parent_the_settings_and_what_changed() -> None:
    text = run_details.metrics_and_configuration(
        frame(spec=SPEC, snapshot=snapshot(changes=("trainer.max_epochs=60",)))
    ).plain
    assert "started from\nold-pine-11aa:4500\n" in text
    assert "model.learning_rate  0.002" in text
    assert "changed for this attempt\ntrainer.max_epochs=60" in text


def test_hyperparameters_are_shown_for_a_script_whose_configuration_is_unknown() -> None:
    script = replace(SPEC, config=None, command=("python", "train.py"), start_from=None)
    values = {"width": 32, "name": "digits"}
    assert (
        "width  32"
        in run_details.metrics_and_configuration(frame(spec=script, hyperparameters=values)).plain
    )
    assert (
        "hyperparameters"
        not in run_details.metrics_and_configuration(frame(spec=SPEC, hyperparameters=values)).plain
    )


def test_the_learning_rate_of_the_last_step_is_a_figure() -> None:
    curves = {run_details.LEARNING_RATE: curve([0.002, 0.0015])}
    (line,) = [
        line
        for line in run_details.metrics_and_configuration(frame(curves=curves)).plain.splitlines()
        if "learning rate" in line
    ]
    assert line.split() == ["learning", "rate", "0.001500"]
    assert "learning rate" not in run_details.metrics_and_configuration(frame()).plain


def test_checkpoints_of_the_script_are_marked_as_its_own() -> None:
    own = CheckpointInfo(
        path="/csv/15-0.160.ckpt", global_step=15, reason="best by val/loss = 0.16",
        saved_at=NOW - 5, size_bytes=2048,
    )  # fmt: skip
    text = run_details.checkpoints_and_events(
        frame(snapshot=snapshot(checkpoints=(), script_checkpoints=(own,)))
    ).plain
    assert text.startswith("checkpoints\nnone by ltui yet\n")
    assert "script's own callbacks\nstep 15, best by val/loss = 0.16, 2.00 KiB, 5 s ago\n" in text
    assert "/csv/15-0.160.ckpt" in text


def test_the_reason_of_a_checkpoint_is_made_safe() -> None:
    hostile = CheckpointInfo(path="/a.ckpt", global_step=15, reason="end\x1b]0;title\x07\x9b2J")
    for changes in ({"checkpoints": (hostile,)}, {"script_checkpoints": (hostile,)}):
        shown = snapshot(**changes)
        text = run_details.checkpoints_and_events(frame(snapshot=shown)).plain
        assert "step 15" in text
        assert not {"\x1b", "\x07", "\x9b"} & set(text)


def test_the_job_of_slurm_is_among_the_facts() -> None:
    job = JobSnapshot(id="12", node_names="n[07-08]", partition="gpu", ends_at=NOW + 3600)
    text = run_details.checkpoints_and_events(frame(snapshot=snapshot(job=job))).plain
    assert "SLURM job: 12 on n[07-08], partition gpu\ntime limit: 20" in text
    unlimited = snapshot(job=JobSnapshot(id="12"))
    text = run_details.checkpoints_and_events(frame(snapshot=unlimited)).plain
    assert "SLURM job: 12\n" in text
    assert "time limit" not in text


def test_the_header_says_when_the_job_ends() -> None:
    job = JobSnapshot(id="12", ends_at=NOW + 3 * 3600 + 600)
    assert run_view.header(frame(snapshot=snapshot(job=job))).job == "job ends in 3 h 10 m"
    ended = snapshot(job=job, state=RunState.STOPPED)
    assert run_view.header(frame(snapshot=ended)).job == ""


def test_the_time_of_the_last_checkpoints_is_shown() -> None:
    text = run_details.checkpoints_and_events(
        frame(snapshot=snapshot(checkpoint_seconds=(2.0, 12.0, 3.0)))
    ).plain
    assert "the last ones took up to 12 s\n" in text
