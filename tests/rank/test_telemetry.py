"""The records of one rank, for every kind of training that Lightning supports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ltui.training.rank import telemetry
from ltui.training.rank.channel import current_channel
from ltui.training.rank.telemetry import count_samples, local_value
from ltui.training.shared.record_types import Outcome, Phase, RecordKind, StepField
from ltui.training.tensor_queue.queue_writer import QueueWriter
from tests.rank.models import Endless, Linear, TwoOptimizers, loader
from tests.rank.runs import RunFolder
from tests.required import required

PARTS = [StepField.FETCH_S, StepField.TRANSFER_S, StepField.FORWARD_S]
PARTS += [StepField.BACKWARD_S, StepField.OPTIMIZER_S]


def test_a_row_for_every_batch(run: RunFolder, fit: Any) -> None:
    fit(Linear(step_s=0.01), loader(5), loader(2), max_epochs=2)
    rows = run.steps()
    assert rows[:, StepField.GLOBAL_STEP].tolist() == list(range(1, 11))
    assert rows[:, StepField.EPOCH].tolist() == [0] * 5 + [1] * 5
    assert rows[:, StepField.BATCH].tolist() == [0, 1, 2, 3, 4] * 2
    assert set(rows[:, StepField.SAMPLES]) == {4}
    assert set(rows[:, StepField.STEPPED]) == {1}
    # The rate that the step used, not the one that the scheduler set after it.
    assert rows[:4, StepField.LR] == pytest.approx([0.01, 0.01, 0.01, 0.005])
    assert (rows[:, StepField.FORWARD_S] >= 0.01).all()
    assert (rows[:, PARTS].sum(axis=1) <= rows[:, StepField.STEP_S]).all()
    assert (rows[:, PARTS] > 0).all()
    pulse = required(run.pulse())
    assert (pulse.outcome, pulse.telemetry_ok) == (Outcome.FINISHED, True)
    assert pulse.global_step == 10
    (hello,) = run.labels(RecordKind.HELLO)
    assert (hello["rank"], hello["world_size"], hello["pid"]) == (0, 1, pulse.pid)
    (plan,) = run.labels(RecordKind.PLAN)
    assert (plan["max_steps"], plan["max_epochs"], plan["batches_per_epoch"]) == (10, 2, 5)
    assert plan["val_batches"] == 2
    assert [e["global_step"] for e in run.events("finished")] == [10]


def test_the_pulse_has_the_phase_of_a_step(run: RunFolder, fit: Any) -> None:
    observed: list[tuple[str, Phase, int]] = []

    def read_pulse(where: str) -> None:
        pulse = required(run.pulse())
        observed.append((where, pulse.phase, pulse.batch))

    class Watched(Linear):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            read_pulse("backward")

        def on_after_backward(self) -> None:
            read_pulse("backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            read_pulse("optimizer")

        def on_train_batch_end(self, *_: Any) -> None:
            read_pulse("end")

    model = Watched(lambda _, index: read_pulse("training" if index >= 0 else "validation"))
    fit(model, loader(2), loader(1), max_epochs=1)
    step = [
        ("training", Phase.FORWARD),
        *[("backward", Phase.BACKWARD)] * 2,
        ("optimizer", Phase.OPTIMIZER),
        ("end", Phase.BATCH_END),
    ]
    expected = [(where, phase, batch) for batch in (0, 1) for where, phase in step]
    assert observed[:-1] == expected
    assert observed[-1][:2] == ("validation", Phase.VALIDATION)


def test_lightning_calls_one_hook_a_batch(run: RunFolder, fit: Any) -> None:
    """Each call of a callback's hook by Lightning costs more than what is done in it."""
    called: list[set[str]] = []

    def read_pulse(module: Any, index: int) -> None:
        (own,) = (c for c in module.trainer.callbacks if type(c).__name__ == "LtuiRank")
        every_batch = {n for n in dir(Callback) if "train_batch" in n or "on_before" in n}
        every_batch |= {"on_after_backward"}
        called.append({name for name in every_batch if callable(getattr(own, name))})

    fit(Linear(read_pulse), loader(2), max_epochs=1)
    assert called == [{"on_train_batch_end"}] * 2


def test_only_a_profiler_that_does_nothing_is_silenced(
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(PassThroughProfiler, "start", lambda _, name: started.append(name))
    trainer = fit(Linear(), loader(5), max_epochs=1)
    assert not [name for name in started if name in ("run_training_batch", "train_dataloader_next")]
    with trainer.profiler.profile("own") as name:
        assert name == "own"

    class Own(PassThroughProfiler):
        """Does something."""

    for profiler in (Own(), SimpleProfiler()):
        started.clear()
        fit(Linear(), loader(5), max_epochs=1, profiler=profiler)
        recorded = getattr(profiler, "recorded_durations", {})
        times = len(recorded.get("run_training_batch", ())) or started.count("run_training_batch")
        assert times == 5


def test_loss_is_what_training_step_returned(run: RunFolder, fit: Any) -> None:
    model = Linear()
    losses: list[float] = []
    model.on_before_backward = lambda loss: losses.append(loss.item() * 2)  # type: ignore[method-assign]
    fit(model, loader(5), max_epochs=1, accumulate_grad_batches=2)
    assert run.column(StepField.LOSS) == pytest.approx(losses)
    assert run.column(StepField.STEPPED) == [0, 1, 0, 1, 1]
    assert run.column(StepField.GLOBAL_STEP) == [0, 1, 1, 2, 3]
    assert run.labels(RecordKind.PLAN)[0]["max_steps"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "accumulate"),
    [("32-true", 1), ("32-true", 2), ("bf16-true", 1), ("bf16-mixed", 3)],
)
def test_losses_on_a_gpu_are_sent_with_their_steps(
    run: RunFolder, fit: Any, precision: str, accumulate: int
) -> None:
    model = Linear()
    losses: list[float] = []
    model.on_before_backward = lambda loss: losses.append(loss.item() * accumulate)  # type: ignore[method-assign]
    options = {"precision": precision, "accumulate_grad_batches": accumulate}
    fit(model, loader(6), accelerator="cuda", max_epochs=1, **options)
    torch.cuda.synchronize()
    required(current_channel()).queue.flush_staged()
    sent = run.metrics()["train/loss"]
    assert [value for _, value in sent] == pytest.approx(losses, rel=1e-6)
    assert [step for step, _ in sent] == [(batch + 1) // accumulate for batch in range(6)]
    assert all(math.isnan(loss) for loss in run.column(StepField.LOSS))
    assert all(held > 0 for held in run.column(StepField.MEMORY_BYTES))


@pytest.mark.parametrize("workers", [0, 1])
def test_wait_for_data_is_separated_from_work(run: RunFolder, fit: Any, workers: int) -> None:
    """A sleep takes at least its time, and what is counted twice would exceed the whole step."""
    fetch_s, step_s = 0.016, 0.006
    data = loader(30, sleep_s=fetch_s / 4, num_workers=workers)
    fit(Linear(step_s=step_s), data, max_epochs=1)
    rows = run.steps()[5:]
    fetched, worked = rows[:, StepField.FETCH_S], rows[:, StepField.FORWARD_S]
    # A sleep is measured by another clock.
    assert fetched.min() > (fetch_s * 0.99 if workers == 0 else 0.0)
    assert worked.min() > step_s * 0.99
    assert (fetched + worked <= rows[:, StepField.STEP_S] + 1e-6).all()


def test_manual_optimization_with_two_optimizers(run: RunFolder, fit: Any) -> None:
    fit(TwoOptimizers(), loader(4), max_epochs=1)
    rows = run.steps()
    assert rows[:, StepField.GLOBAL_STEP].tolist() == [2, 4, 6, 8]
    assert (rows[:, [StepField.BACKWARD_S, StepField.OPTIMIZER_S]] > 0).all()
    assert np.isnan(rows[:, StepField.LOSS]).all()
    assert run.labels(RecordKind.PLAN)[0]["max_steps"] is None


def test_endless_data_and_limits_by_time_and_steps(run: RunFolder, fit: Any) -> None:
    data = torch.utils.data.DataLoader(Endless(), batch_size=2)
    fit(Linear(), data, max_steps=7)
    assert run.column(StepField.GLOBAL_STEP) == list(range(1, 8))
    (plan,) = run.labels(RecordKind.PLAN)
    assert (plan["max_steps"], plan["batches_per_epoch"]) == (7, None)
    fit(Linear(step_s=0.01), data, max_epochs=-1, max_time={"seconds": 1})
    later = run.steps()[7:]
    assert len(later) > 5
    assert later[0, StepField.GLOBAL_STEP] == 1
    assert run.labels(RecordKind.PLAN)[1]["max_steps"] is None


def test_two_trainers_then_fit_again_then_test(run: RunFolder, fit: Any) -> None:
    model = Linear()
    fit(model, loader(2), max_epochs=1)
    trainer = fit(model, loader(3), max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    fit(model, loader(3), trainer=trainer)
    fit(model, loader(2), trainer=trainer, call="test")
    fit(model, loader(2), call="validate")
    assert run.column(StepField.GLOBAL_STEP) == [1, 2, 1, 2, 3, 4, 5, 6]
    assert len(run.labels(RecordKind.HELLO)) == 1
    assert {"test_loss", "val_loss"} <= set(run.metrics())
    assert len(run.events("finished")) == 3


def test_sanity_check_is_no_validation(run: RunFolder, fit: Any) -> None:
    phases: list[int] = []
    model = Linear()
    model.on_validation_batch_start = lambda *_: phases.append(required(run.pulse()).phase)  # type: ignore
    fit(model, loader(3), loader(3), max_epochs=1, num_sanity_val_steps=2)
    assert phases == [Phase.SANITY] * 2 + [Phase.VALIDATION] * 3
    assert [step for step, _ in run.metrics()["val_loss"]] == [3]
    assert [e["text"] for e in run.events("phase")] == ["Validation began.", "Validation ended."]


def test_an_exception_is_reported_and_raised(run: RunFolder, fit: Any) -> None:
    def fail(_: Any, index: int) -> None:
        if index == 2:
            raise ValueError("the user's own mistake")

    with pytest.raises(ValueError, match="own mistake"):
        fit(Linear(fail), loader(5), max_epochs=1)
    (event,) = run.events("exception")
    assert (event["type"], event["message"]) == ("ValueError", "the user's own mistake")
    assert "in fail" in event["traceback"]
    pulse = required(run.pulse())
    assert (pulse.phase, pulse.outcome) == (Phase.EXCEPTION, Outcome.RAISED)


def test_a_nonfinite_loss_is_reported_once(run: RunFolder, fit: Any) -> None:
    def set_weights_to_nan(module: Linear, index: int) -> None:
        if index == 1:
            torch.nn.init.constant_(module.layer.weight, math.nan)

    fit(Linear(set_weights_to_nan), loader(5), max_epochs=1)
    (note,) = run.events("note")
    assert "NaN" in note["text"]
    assert note["step"] == 2
    assert [math.isnan(loss) for loss in run.column(StepField.LOSS)] == [False] + [True] * 4


def test_the_loss_of_several_ranks_is_read_without_a_collective(tmp_path: Any) -> None:
    """A share of a value that was split over the ranks is left out."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        mesh, loss = init_device_mesh("cpu", (1,)), torch.tensor(3.0)
        whole = local_value(DTensor.from_local(loss, mesh, [Replicate()]))
        assert (type(whole), whole.item()) == (torch.Tensor, 3.0)
        assert local_value(DTensor.from_local(loss, mesh, [Partial()])) is None
        assert local_value(loss) is loss
    finally:
        dist.destroy_process_group()


def test_failing_telemetry_is_switched_off(run: RunFolder, fit: Any, monkeypatch: Any) -> None:
    def fail(batch: Any) -> float:
        raise RuntimeError("telemetry is broken")

    monkeypatch.setattr(telemetry, "count_samples", fail)
    trainer = fit(Linear(), loader(5), loader(2), max_epochs=2)
    assert trainer.global_step == 10
    (event,) = run.events("telemetry_off")
    assert "telemetry is broken" in event["error"]
    pulse = required(run.pulse())
    assert (pulse.telemetry_ok, pulse.outcome) == (False, Outcome.FINISHED)
    assert len(run.steps()) == 0


@dataclass
class Windows:
    """A batch as darts makes them."""

    covariates: torch.Tensor | None
    target: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        (torch.tensor(1.0), 1),
        ([torch.zeros(5), 1], 5),
        ({"ids": (torch.zeros(6, 1),)}, 6),
        (np.zeros((7, 2)), 7),
        (Windows(None, torch.zeros(8, 2)), 8),
        *((batch, math.nan) for batch in (None, "text", [], {}, object())),
    ],
)
def test_samples_of(batch: Any, samples: float) -> None:
    assert count_samples(batch) == pytest.approx(samples, nan_ok=True)


def test_samples_of_a_batch_whose_attributes_raise() -> None:
    class Fields:
        def __getattr__(self, name: str) -> Any:
            return {"ids": torch.zeros(3)}[name]

    assert math.isnan(count_samples(Fields()))


def test_a_mark_counts_until_something_newer_is_published(run: RunFolder) -> None:
    run.queue_dir.mkdir(parents=True)
    writer = QueueWriter.create(run.queue_dir / "rank-00000.queue", capacity_bytes=4096)
    pulse = writer.pulse
    pulse.set(phase=Phase.BATCH_END, global_step=7)
    began = pulse.changed_ns
    pulse.mark[3] = 7
    pulse.mark[1], pulse.mark[0] = began + 1_000_000_000, Phase.BACKWARD
    observed = required(run.pulse())
    assert (observed.phase, observed.global_step) == (Phase.BACKWARD, 7)
    assert observed.changed_ns == began + 1_000_000_000
    assert observed.changed_wall_s == pytest.approx(pulse.changed_wall_s + 1)
    pulse.beat()
    assert required(run.pulse()).phase == Phase.BACKWARD
    pulse.mark[1], pulse.mark[0] = began + 2_000_000_000, Phase.BATCH_END
    assert required(run.pulse()).phase == Phase.BATCH_END
    writer.close()
