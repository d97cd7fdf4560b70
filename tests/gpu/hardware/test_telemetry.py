"""The section ``telemetry``: its counting, its judgement, and a rehearsal on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ltui.training.tensor_queue.queue_writer import QueueWriter
from tests.gpu.hardware import telemetry
from tests.gpu.hardware.check import off
from tests.gpu.hardware.queued_values import check_values, judge_values
from tests.gpu.hardware.section import run_section
from tests.gpu.hardware.telemetry import (
    CLOSES,
    CONTROL,
    EMPTY,
    OPENS,
    READ,
    READS,
    TELEMETRY,
    TRACE,
    WAITS,
    calls_in_window,
    calls_per_step,
    judge_guard,
    judge_host_time,
    judge_synchronisations,
)


def _events(*named: str) -> list[Any]:
    """Events of one microsecond, ten apart."""
    return [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=10 * at, end=10 * at + 1))
        for at, name in enumerate(named)
    ]


def test_only_calls_that_wait_are_counted_and_only_in_the_window() -> None:
    events = _events(
        "cudaDeviceSynchronize", OPENS, "cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemcpy2DAsync",
        "cudaStreamSynchronize", "Memcpy DtoH (Device -> Pinned)",
        "Memcpy DtoH (Device -> Pageable)", "cudaEventQuery", "cudaEventRecord",
        "cudaStreamWaitEvent", "cudaEventSynchronize", "cudaMemcpy", "cudaStreamSynchronize",
        CLOSES, "cudaDeviceSynchronize", "cudaStreamSynchronize",
    )  # fmt: skip
    calls = calls_in_window(reversed(events), WAITS)
    assert calls == {
        "cudaStreamSynchronize": 2,
        "cudaEventSynchronize": 1,
        "cudaMemcpy": 1,
        "Memcpy DtoH (Device -> Pageable)": 1,
    }
    assert calls_per_step(calls, 2)["cudaStreamSynchronize"] == 1.0
    with pytest.raises(ValueError, match="marks"):
        calls_in_window(_events("cudaStreamSynchronize"), WAITS)


def test_counting_reads_a_real_profile() -> None:
    value = torch.ones(1)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        value.item()
        with record_function(OPENS):
            pass
        for _ in range(3):
            value.item()
        with record_function(CLOSES):
            pass
        value.item()
    assert calls_in_window(profiled.events(), READS) == {READ: 3}
    assert calls_in_window(profiled.events(), WAITS) == {}


@pytest.mark.parametrize(
    ("cost", "errors", "count"),
    [(39.9, [], 0), (40.1, [], 1), (12.0, ["RuntimeError: it waits"], 1)],
)
def test_a_step_that_costs_too_much_is_off(cost: float, errors: list[str], count: int) -> None:
    figures = {
        "telemetry_us": cost,
        "telemetry_fast_us": cost,
        "steps": 900,
        "median_step_us": {EMPTY: 400.0},
        "errors": errors,
    }
    assert len(off(judge_host_time(figures, rehearsal=False))) == count


SYNCHRONISES = "cudaStreamSynchronize"


@pytest.mark.parametrize(
    ("of_telemetry", "control", "allowed", "count"),
    [
        ({SYNCHRONISES: 1.0}, {SYNCHRONISES: 2.0}, {}, 0),
        ({SYNCHRONISES: 1.02}, {SYNCHRONISES: 2.0}, {}, 1),
        ({SYNCHRONISES: 1.0, "cudaMemcpy": 1.0}, {SYNCHRONISES: 2.0}, {}, 1),
        ({SYNCHRONISES: 1.0}, {SYNCHRONISES: 1.0}, {}, 1),
        ({SYNCHRONISES: 1.0, READ: 1.0}, {SYNCHRONISES: 1.0, READ: 1.0}, {READ: 1.0}, 0),
    ],
)
def test_an_added_wait_is_off(
    of_telemetry: dict[str, float], control: dict[str, float], allowed: dict[str, float], count: int
) -> None:
    calls = {EMPTY: {SYNCHRONISES: 1.0}, TELEMETRY: of_telemetry, CONTROL: control}
    none: dict[str, dict[str, float]] = {EMPTY: {}, TELEMETRY: {}}
    figures = {"calls_a_step": calls, "allocations_a_step": none, "errors": []}
    assert len(off(judge_synchronisations(figures, allowed))) == count


def test_a_guard_that_notices_nothing_is_off() -> None:
    right: dict[str, Any] = {
        "calls": dict.fromkeys(telemetry.HOOKS, 20),
        "errors": [],
        "notices_a_wait": True,
    }
    assert off(judge_guard(right)) == []
    for wrong in (
        {"notices_a_wait": False},
        {"calls": {"on_train_batch_end": 3}},
        {"errors": ["RuntimeError: called a synchronizing"]},
    ):
        assert len(off(judge_guard({**right, **wrong}))) == 1


# -- values in the queue ---------------------------------------------------------------------------


def test_values_are_read_by_another_process(tmp_path: Path) -> None:
    checks = list(check_values(tmp_path, torch.device("cpu")))
    assert off(checks) == []
    assert any(check.what.startswith("queue: wrong values of 20, freed") for check in checks)
    assert not list(tmp_path.glob("*.queue"))


def test_values_of_later_work_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a put took what the source holds when its copy is made."""
    put = QueueWriter.put

    def late(self: Any, tensor: torch.Tensor | None, *rest: Any) -> None:
        put(self, tensor if tensor is None else torch.zeros_like(tensor), *rest)

    monkeypatch.setattr(QueueWriter, "put", late)
    wrong = " ".join(off(check_values(tmp_path, torch.device("cpu"))))
    assert "overwritten" in wrong
    assert "large" in wrong


@pytest.mark.parametrize(
    ("records", "missed", "count"),
    [
        ([["a 0", "x"], ["b 1", "y"]], 3, 0),
        ([["a 0", "x"], ["b 1", "z"]], 3, 1),
        ([["b 1", "y"], ["a 0", "x"]], 3, 1),
        ([["a 0", "x"], ["b 1", "y"]], 0, 1),
        ([["a 0", "x"]], 3, 2),
    ],
)
def test_wrong_missing_and_disordered_values_are_off(
    records: list[list[str]], missed: int, count: int
) -> None:
    read = {"records": records, "missed": missed}
    assert len(off(judge_values([("a 0", "x"), ("b 1", "y")], read, 3))) == count


@pytest.mark.slow
def test_rehearsal(tmp_path: Path) -> None:
    """On the CPU telemetry reads the loss once a step: the same code has to count that."""
    checks = run_section("tests.gpu.hardware.telemetry", tmp_path, rehearsal=True, limit_s=200)
    assert off(checks) == [], (tmp_path / "log.txt").read_text()[-3000:]
    (waits,) = (check for check in checks if check.what == "telemetry: calls a step that wait")
    assert READ in waits.measured
    assert (tmp_path / TRACE).stat().st_size > 1000
