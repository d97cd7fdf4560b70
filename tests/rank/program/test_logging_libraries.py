"""Programs that log by the usual libraries, in processes of their own.

Those that are not installed here are replaced by packages of the same public functions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.training.shared.record_types import RecordKind
from tests.rank.runs import RunFolder

LOGS = Path(__file__).parents[1] / "scripts" / "logs.py"

TENSORBOARD = """
import torch
from {package} import SummaryWriter
train, val = SummaryWriter("runs/train"), SummaryWriter("runs/val")
def log(step, value):
    assert train.add_scalar("loss", torch.tensor(value), step) is None
    train.add_scalars("rates", {{"low": value, "high": 2 * value}}, global_step=step)
    val.add_scalar(tag="loss", scalar_value=-value, global_step=100 * step)
    train.add_histogram("weights", torch.ones(3), step)
def end():
    train.close(), val.close()
"""
TENSORBOARD_X = """
class SummaryWriter:
    def __init__(self, logdir): self.logdir = logdir
    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None): pass
    def add_scalars(self, main_tag, tag_scalar_dict, global_step=None, walltime=None): pass
    def add_histogram(self, *_): pass
    def close(self): pass
"""
WANDB = """
class Run:
    def log(self, data, step=None, commit=None):
        if not isinstance(data, dict): raise TypeError("a dictionary")
        return len(data)
"""
USE_WANDB = """
import wandb
run = wandb.init()
def log(step, value):
    assert wandb.log({"loss": value, "val": {"acc": 2 * value}, "text": "x"}) == 3
    run.log({"lr": value}, step=1000 * step, commit=True)
def end():
    for wrong in ([1], None):
        try: wandb.log(wrong)
        except TypeError as error: assert str(error) == "a dictionary"
        else: raise AssertionError
    try: wandb.log()
    except TypeError as error: assert "Run.log() missing 1 required" in str(error), error
    else: raise AssertionError
"""
TRACKIO = """
class Run:
    def log(self, metrics, step=None): pass
"""
USE_TRACKIO = """
import trackio
def log(step, value): trackio.log({"loss": value, "val/acc": 2 * value}, step=step)
def end(): pass
"""
MLFLOW = """
from collections import namedtuple
Metric = namedtuple("Metric", "key value timestamp step")
class MlflowClient:
    def log_metric(self, run_id, key, value, timestamp=None, step=None, synchronous=None): pass
    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None): pass
"""
MLFLOW_PACKAGE = """
from mlflow.tracking.client import Metric, MlflowClient
def log_metric(key, value, step=None):
    return MlflowClient().log_metric("run", key, value, 0, step or 0, synchronous=True)
def log_metrics(metrics, step=None):
    metrics = [Metric(key, value, 0, step or 0) for key, value in metrics.items()]
    return MlflowClient().log_batch(run_id="run", metrics=metrics, params=[])
"""
USE_MLFLOW = """
import mlflow
def log(step, value):
    mlflow.log_metric("loss", value, step=step)
    mlflow.log_metric("error", value)
    mlflow.log_metrics({"acc": 2 * value, "lr": 0.1})
def end(): mlflow.MlflowClient().log_batch("run", tags=["a tag"])
"""
TRANSFORMERS = """
from types import SimpleNamespace
import mlflow, wandb
from torch.utils.tensorboard import SummaryWriter
class Trainer:
    def __init__(self):
        self.state = SimpleNamespace(epoch=0.0, global_step=0)
        self.writer = SummaryWriter("runs")
    def log(self, logs, start_time=None):
        logs["epoch"] = self.state.epoch
        names = {n: n.replace("eval_", "eval/") if "eval" in n else f"train/{n}" for n in logs}
        for name, value in logs.items():
            self.writer.add_scalar(names[name], value, self.state.global_step)
        rewritten = {names[name]: value for name, value in logs.items()}
        wandb.log({**rewritten, "train/global_step": self.state.global_step, "mine": 3.0})
        mlflow.log_metrics(metrics=logs, step=self.state.global_step)
"""
USE_TRANSFORMERS = """
from transformers.trainer import Trainer
class Own(Trainer):
    def log(self, logs, start_time=None): super().log({**logs, "entropy": 1.0}, start_time)
trainer = Own()
def log(step, value):
    trainer.state.global_step, trainer.state.epoch = step, step / 4
    trainer.log({"loss": value})
def end(): trainer.log({"eval_loss": 7.0})
"""
ACCELERATE = """
class Accelerator:
    def log(self, values, step=None, log_kwargs=None):
        import wandb
        wandb.log(values, step=step)
"""
USE_ACCELERATE = """
import wandb
from accelerate.accelerator import Accelerator
accelerator = Accelerator()
def log(step, value): accelerator.log({"loss": value}, step=step)
def end(): wandb.log({"loss": 9.0})
"""
USE_FABRIC = """
import torch
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
def log(step, value):
    fabric.log("loss", torch.tensor(value), step=step)
    fabric.log_dict({"acc": 2 * value}, step)
def end(): pass
"""

STAND_INS = {
    "tensorboardX/__init__.py": "from tensorboardX.writer import SummaryWriter",
    "tensorboardX/writer.py": TENSORBOARD_X,
    "wandb/__init__.py": "from wandb.sdk.wandb_run import Run\n"
    "def init():\n    global log\n    run = Run()\n    log = run.log\n    return run\ninit()",
    "wandb/sdk/wandb_run.py": WANDB,
    "trackio/__init__.py": "from trackio.run import Run\n"
    "def log(metrics, step=None): Run().log(metrics=metrics, step=step)",
    "trackio/run.py": TRACKIO,
    "mlflow/__init__.py": MLFLOW_PACKAGE,
    "mlflow/tracking/client.py": MLFLOW,
    "transformers/trainer.py": TRANSFORMERS,
    "accelerate/accelerator.py": ACCELERATE,
    "uses_tensorboard.py": TENSORBOARD.format(package="torch.utils.tensorboard"),
    "uses_tensorboard_x.py": TENSORBOARD.format(package="tensorboardX"),
    "uses_wandb.py": USE_WANDB,
    "uses_trackio.py": USE_TRACKIO,
    "uses_mlflow.py": USE_MLFLOW,
    "uses_transformers.py": USE_TRANSFORMERS,
    "uses_accelerate.py": USE_ACCELERATE,
    "uses_fabric.py": USE_FABRIC,
}

Curves = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for name, text in STAND_INS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


Logged = Callable[[str], Curves]


@pytest.fixture
def logged(packages: Path, run: RunFolder, execute: Callable[..., str]) -> Logged:
    """Return the curves of a program that logs by a module."""

    def curves(module: str) -> Curves:
        execute(LOGS, module, folders=(packages,))
        assert run.events("note") == []
        return run.metrics()

    return curves


def at_each_step(factor: float = 1.0) -> list[tuple[int, float]]:
    return [(step, factor * (step or 0.5)) for step in range(5)]


ALWAYS = [(step, 0.1) for step in range(5)]
TENSORBOARD_CURVES = {
    "loss": at_each_step(),
    "val/loss": at_each_step(-1),
    "rates/low": at_each_step(),
    "rates/high": at_each_step(2),
}


@pytest.mark.parametrize(
    ("module", "curves"),
    [
        ("uses_tensorboard", TENSORBOARD_CURVES),
        ("uses_tensorboard_x", TENSORBOARD_CURVES),
        ("uses_wandb", {"loss": at_each_step(), "val.acc": at_each_step(2), "lr": at_each_step()}),
        ("uses_trackio", {"loss": at_each_step(), "val/acc": at_each_step(2)}),
        (
            "uses_mlflow",
            {"loss": at_each_step(), "error": at_each_step(), "acc": at_each_step(2), "lr": ALWAYS},
        ),
        ("uses_accelerate", {"loss": [*at_each_step(), (4, 9.0)]}),
        ("uses_fabric", {"loss": at_each_step(), "acc": at_each_step(2)}),
    ],
)
def test_all_values_of_a_library_are_recorded(logged: Logged, module: str, curves: Curves) -> None:
    if module == "uses_tensorboard":
        pytest.importorskip("tensorboard")
    assert logged(module) == curves


def test_hugging_face_trainer_that_reports_to_several_libraries(logged: Logged) -> None:
    pytest.importorskip("tensorboard")
    curves = logged("uses_transformers")
    assert curves.pop("train/epoch") == [(step, step / 4) for step in range(5)]
    assert curves == {
        "train/loss": at_each_step(),
        "train/entropy": [(step, 1.0) for step in range(5)],
        "mine": [(step, 3.0) for step in range(5)],
        "eval/loss": [(4, 7.0)],
    }


def test_a_program_without_steps_records_what_it_has_logged_when_it_ends(
    packages: Path, run: RunFolder, execute: Callable[..., str]
) -> None:
    execute(
        "import torch, uses_trackio as u; [u.log(n, 4.0 - n) for n in range(2)]",
        folders=(packages,),
    )
    assert [value for _, value in run.metrics()["loss"]] == [4.0, 3.0]
    (hello,) = run.labels(RecordKind.HELLO)
    assert (hello["program"], hello["saves"]) == ("PyTorch without torch.optim", False)
    assert run.pulse() is None


def test_a_process_beside_a_rank_records_nothing(
    packages: Path, run: RunFolder, execute: Callable[..., str]
) -> None:
    run.queue_dir.mkdir(parents=True)
    (run.queue_dir / "rank-00000.queue").touch()
    execute("import torch, uses_trackio as u; u.log(3, 4.0)", folders=(packages,))
    assert (run.queue_dir / "rank-00000.queue").stat().st_size == 0
