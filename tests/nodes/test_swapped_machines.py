"""The quickstart preset on two machines without agents: stopped, resumed on swapped machines.

Torch elastic is started on each machine with the environment that the supervisor sets. The machines
share no folder. Instead of agents, a thread of the test mirrors the barrier tables.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.config.presets import build_spec, load_preset
from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.nodes.barrier_mirror import BarrierMirror
from ltui.training.shared.record_types import StepField
from ltui.training.store.run_checkpoints import checkpoint_to_resume
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.engine_command import engine_start, write_rank_config
from ltui.training.tensor_queue.control_block import Command
from tests.nodes.two_machines import Machine, Machines, open_machines, run_on, start_on
from tests.rank.runs import RunFolder
from tests.required import required
from tests.waiting import wait_for

RUN_ID = "swapped-0000"
EPOCHS, STEPS_AN_EPOCH = 3, 45
PORT = 29500
LIMIT_S = 600


@dataclass
class Attempt:
    """One start of the engines on machines, of which the first is node 0."""

    machines: Sequence[Machine]
    spec: RunSpec
    number: int
    resume_from: Path | None = None
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def folders(self) -> list[RunDir]:
        return [RunDir(machine.home / "runs" / RUN_ID) for machine in self.machines]

    @property
    def runs(self) -> list[RunFolder]:
        """The folders by rank: each machine has one rank."""
        return [RunFolder(folder.path, attempt=self.number) for folder in self.folders]

    def start(self) -> None:
        for rank, (machine, run_dir) in enumerate(zip(self.machines, self.folders, strict=True)):
            address = self.machines[0].address
            nodes = Nodes(count=len(self.machines), rank=rank, address=address, port=PORT)
            spec = replace(self.spec, nodes=nodes, cwd=str(machine.folder))
            for folder in (run_dir.queue_dir(self.number), run_dir.logs_dir(self.number)):
                folder.mkdir(parents=True)
            run_dir.config_path(self.number).parent.mkdir(exist_ok=True)
            write_rank_config(run_dir, spec, self.number)
            # Only node 0 has the path of the checkpoint.
            path = None if rank else self.resume_from
            start = engine_start(run_dir, spec, self.number, path, ())
            env = {name: value for name, value in start["env"].items() if value is not None}
            self.processes.append(
                start_on(machine, start["argv"], env={**env, "LTUI_NODES": str(nodes.count)})
            )

    def wait(self) -> None:
        for process in self.processes:
            output, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, f"{output}\n{errors}\n{self.rank_logs()}"

    def rank_logs(self) -> str:
        paths = [run.rank_log_path(self.number, rank) for rank, run in enumerate(self.folders)]
        return "\n".join(path.read_text()[-3000:] for path in paths if path.exists())

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        """Copy the barrier tables between the machines until the attempt has ended."""
        mirrors = [BarrierMirror(folder.queue_dir(self.number)) for folder in self.folders]
        ended = threading.Event()

        def copy() -> None:
            while not ended.wait(0.01):
                for source in mirrors:
                    for target in mirrors:
                        if target is not source:
                            target.merge(source.export())

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for mirror in mirrors:
                mirror.close()

    def losses(self) -> list[list[float]]:
        return [run.column(StepField.LOSS, rank) for rank, run in enumerate(self.runs)]

    def metrics(self) -> dict[str, dict[int, float]]:
        return {name: dict(values) for name, values in self.runs[0].metrics().items()}

    def weights(self) -> Any:
        import torch

        info = required(checkpoint_to_resume(self.folders[0].checkpoints_dir))
        return torch.load(info.path, weights_only=True)["state_dict"]


def hide_from_each_other(machines: Machines) -> None:
    """Mount an empty folder over the files of the other machine, which share this disk."""
    for machine, other in ((machines[0], machines[1]), (machines[1], machines[0])):
        other.home.mkdir()
        run_on(machine, ["mount", "-t", "tmpfs", "tmpfs", str(other.home)], code=0)


def train(attempt: Attempt, stop_at: int | None = None) -> Attempt:
    """Train to the end, or until a stop that is requested at a step."""
    with attempt.mirrored():
        attempt.start()
        try:
            if stop_at is not None:
                run = attempt.runs[0]
                wait_for(
                    lambda: (pulse := run.pulse()) is not None and pulse.global_step >= stop_at,
                    attempt.processes[0],
                    seconds=LIMIT_S,
                )
                run.request(Command.STOP)
            attempt.wait()
        finally:
            for process in attempt.processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
    return attempt


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_quickstart_resumes_exactly_on_swapped_machines(tmp_path: Path) -> None:
    import torch

    spec = build_spec(
        load_preset("quickstart"),
        ["trainer.devices=1", f"trainer.max_epochs={EPOCHS}", "data.init_args.loader=torch"],
        id=RUN_ID,
        name="swapped",
        cwd=tmp_path,
        python=sys.executable,
        created_at=0.0,
    )
    stop_at = random.SystemRandom().randrange(1, (EPOCHS - 1) * STEPS_AN_EPOCH)
    print(f"stop at step {stop_at}")
    with open_machines(tmp_path / "never") as machines:
        never = train(Attempt(list(machines), spec, 1))
    with open_machines(tmp_path / "resumed") as machines:
        hide_from_each_other(machines)
        first = train(Attempt(list(machines), spec, 1), stop_at)
        saved = required(checkpoint_to_resume(first.folders[0].checkpoints_dir))
        assert stop_at <= saved.global_step < EPOCHS * STEPS_AN_EPOCH
        assert list(first.folders[1].checkpoints_dir.iterdir()) == []
        # Node 0 of the resumed run is the other machine, so the run directory has to be there.
        moved = first.folders[1].checkpoints_dir
        moved.rmdir()
        first.folders[0].checkpoints_dir.rename(moved)
        resume_from = moved / Path(saved.path).name
        second = train(Attempt([machines[1], machines[0]], spec, 2, resume_from))
    assert not any("Not exact" in note["text"] for note in second.runs[0].events("note"))
    (resumed,) = second.runs[0].events("resumed")
    assert resumed["global_step"] == saved.global_step
    joined = [a + b for a, b in zip(first.losses(), second.losses(), strict=True)]
    assert joined == never.losses()
    assert len(joined[0]) == EPOCHS * STEPS_AN_EPOCH
    before, after = first.metrics(), second.metrics()
    assert {n: before.get(n, {}) | after.get(n, {}) for n in before | after} == never.metrics()
    weights, reference = second.weights(), never.weights()
    assert weights.keys() == reference.keys()
    assert all(torch.equal(weights[name], reference[name]) for name in reference)
