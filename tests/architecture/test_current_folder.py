"""No process that ltui starts for itself imports a module from the current folder.

The page of ``ltui serve``: tests/serve/test_serve.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ltui.app.nodes.launcher_key import send_by_srun
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.launch_run import check_start
from ltui.training.lifecycle.supervisor_client import AttemptPlan, supervisor_argv
from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.node_places import training_versions
from ltui.training.process.python_environment import module_command
from ltui.training.slurm.batch_script import BatchScript, JobOptions
from ltui.training.slurm.slurm_client import on_head_words
from ltui.training.store.run_directory import RunDir

ROOT = Path(__file__).parents[2]
BY_DESIGN = {
    "training/process/python_environment.py": "the one place",
    "training/supervise/engine_command.py": "/bin/sh -c",
    "training/data/ffcv/beton_script.py": "runs in a rank, with its sys.path",
    "training/lifecycle/record_code.py": "python -I, and git -c",
}


def output(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


def test_every_command_line_is_made_in_one_place() -> None:
    sources = [*(ROOT / "app").rglob("*.py"), *(ROOT / "training").rglob("*.py")]
    with_option = {
        path.relative_to(ROOT).as_posix()
        for path in sources
        if re.search(r"""["']-[mc]["']""", path.read_text())
    }
    assert with_option == BY_DESIGN.keys()


def test_a_step_of_a_job_runs(imported: Path) -> None:
    script = BatchScript(
        run_id="owl-0001", token="t", spec_text="", python=sys.executable, home="h", cwd="/",
        output="o", options=JobOptions(),
    ).text()  # fmt: skip
    (program,) = re.findall(r"^ltui=.*$", script, re.MULTILINE)
    words = on_head_words("1", None, ["key"])
    in_bash = ["bash", "-c", f'{program}\n"${{ltui[@]}}" key']
    for command in (words[words.index(sys.executable) :], in_bash):
        assert LinkKey.from_text(output(command).strip(), "the job")
    assert not imported.exists()


def test_a_key_is_received(
    imported: Path, private_tmpdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = LinkKey.generate()
    started: list[list[str]] = []

    def run(argv: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(argv)
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    srun = private_tmpdir / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o700)
    monkeypatch.setenv("PATH", str(private_tmpdir), prepend=":")
    send_by_srun(key, "a.key", 2, {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "a,b"}, run)
    (argv,) = started
    assert output(argv[argv.index(sys.executable) :], key.text) == ""
    assert list(private_tmpdir.glob("ltui-*/a.key"))
    assert not imported.exists()


def test_the_supervisor_and_the_mirror_start(imported: Path, tmp_path: Path) -> None:
    for command in (
        supervisor_argv(RunDir(tmp_path / "none"), AttemptPlan()),
        module_command("ltui.training.supervise.event_mirror", str(tmp_path / "none"), "m"),
    ):
        assert "none" in output(command)
    assert not imported.exists()


def test_a_preset_imports_from_the_current_folder_what_its_configuration_names(
    imported: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    command = module_command("ltui.training.rank.train_preset", "--check", str(config))
    config.write_text(json.dumps({"config": {"model": {"class_path": "torch.None"}}}))
    assert "torch.None" in output(command)
    assert not imported.exists()
    for path in Path.cwd().iterdir():
        path.unlink()
    Path("of_the_project.py").write_text("raise ValueError('was imported')\n")
    config.write_text(json.dumps({"config": {"model": {"class_path": "of_the_project.Net"}}}))
    assert "was imported" in output(command)


def test_an_interpreter_is_asked(imported: Path) -> None:
    spec = RunSpec(
        id="owl-0001", name="owl", created_at=0.0, cwd=str(Path.cwd()), python=sys.executable,
        config={},
    )  # fmt: skip
    assert "torch" in training_versions(spec)
    check_start(spec)
    assert not imported.exists()
