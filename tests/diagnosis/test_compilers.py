"""A rank that compiles is neither in a busy loop nor frozen, and holds no GIL worth a word."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import (
    Evidence,
    Frame,
    ProcessActivity,
    RankEvidence,
    ThreadStack,
)
from ltui.training.diagnosis.stack_frames import active_compiler, compiler_on_stack, user_frame
from tests.diagnosis.recordings import judged, load

_SITE = "/env/lib/python3/site-packages"
_CALLED = (
    (f"{_SITE}/torch/_dynamo/eval_frame.py", "compile_wrapper"),
    (f"{_SITE}/torch/nn/modules/module.py", "_call_impl"),
    ("/home/user/project/train.py", "training_step"),
)
_KERNEL = "/tmp/kernels/gv/cgv3ti2gs2n2xjzxpcs5l7chfgjdmdv5a3ke3dyk66x35gn3tieu.py"
STACKS: dict[str, tuple[str | None, tuple[tuple[str, str], ...]]] = {
    "waits for the C++ compiler": (
        "torch.compile",
        (
            ("/usr/lib/python3.11/subprocess.py", "communicate"),
            (f"{_SITE}/torch/_inductor/cpp_builder.py", "run_compile_cmd"),
            (f"{_SITE}/torch/_inductor/compile_fx.py", "codegen_and_compile"),
            (f"{_SITE}/torch/_inductor/compile_fx.py", "compile_fx"),
            (f"{_SITE}/torch/_dynamo/output_graph.py", "call_user_compiler"),
            (f"{_SITE}/torch/_dynamo/convert_frame.py", "_compile"),
            *_CALLED,
        ),
    ),
    "compiles the backward": (
        "torch.compile",
        (
            (f"{_SITE}/torch/_inductor/compile_fx.py", "compile_fx_inner"),
            (f"{_SITE}/torch/_functorch/_aot_autograd/runtime_wrappers.py", "_backward_impl"),
            (f"{_SITE}/torch/autograd/graph.py", "_engine_run_backward"),
        ),
    ),
    "runs what was compiled": (
        None,
        (
            (_KERNEL, "call"),
            (f"{_SITE}/torch/_inductor/output_code.py", "__call__"),
            (f"{_SITE}/torch/_functorch/_aot_autograd/runtime_wrappers.py", "runtime_wrapper"),
            *_CALLED,
        ),
    ),
    "tunes a kernel": (
        "Triton",
        (
            (f"{_SITE}/torch/_inductor/runtime/triton_heuristics.py", "benchmark_all_configs"),
            (f"{_SITE}/torch/_inductor/runtime/triton_heuristics.py", "run"),
            (_KERNEL, "call"),
            *_CALLED,
        ),
    ),
    "launches a kernel": (
        None,
        (
            (f"{_SITE}/torch/_inductor/runtime/triton_heuristics.py", "run"),
            (_KERNEL, "call"),
            *_CALLED,
        ),
    ),
    "compiles a kernel": (
        "Triton",
        (
            (f"{_SITE}/triton/backends/nvidia/compiler.py", "make_cubin"),
            (f"{_SITE}/triton/compiler/compiler.py", "compile"),
            (f"{_SITE}/triton/runtime/jit.py", "run"),
            ("/home/user/project/train.py", "training_step"),
        ),
    ),
    "launches its own kernel": (
        None,
        (
            (f"{_SITE}/triton/backends/nvidia/driver.py", "__call__"),
            (f"{_SITE}/triton/runtime/jit.py", "run"),
            ("/home/user/project/train.py", "training_step"),
        ),
    ),
}


def _stack(*frames: tuple[str, str], main: bool = True) -> ThreadStack:
    made = tuple(Frame(file=file, line=3, function=function) for file, function in frames)
    return ThreadStack(name="MainThread", main=main, frames=made)


@pytest.mark.parametrize(("name", "frames"), STACKS.values(), ids=STACKS)
def test_compiling_is_distinguished_from_running(
    name: str | None, frames: tuple[tuple[str, str], ...]
) -> None:
    stack = _stack(*frames)
    assert compiler_on_stack(stack) == name
    line = user_frame(stack)
    assert line is None or line.file == "/home/user/project/train.py"


def test_numba_is_detected_only_while_it_compiles() -> None:
    numba = pytest.importorskip("numba")
    extending = pytest.importorskip("numba.extending")
    seen: list[ThreadStack] = []

    def record_stack() -> None:
        frame, frames = sys._getframe(1), []
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
        seen.append(_stack(*frames))

    def twice(x):
        record_stack()
        return 2 * x

    @extending.overload(twice)
    def _typed(x):  # called by the compiler
        record_stack()
        return lambda x: 2 * x

    def calls_back(x):
        with numba.objmode():
            record_stack()
        return twice(x) + 1

    compiled = numba.njit(calls_back)
    assert compiled(3) == 7
    *while_compiling, running = seen
    assert {compiler_on_stack(s) for s in while_compiling} == {"Numba"}
    assert compiler_on_stack(running) is None
    beside = RankEvidence(
        rank=0, stacks=(_stack(("/a.py", "get")), replace(while_compiling[0], main=False))
    )
    assert active_compiler(beside) == "Numba"


def _compiling(evidence: Evidence, **process: Any) -> Evidence:
    """Return evidence in which rank 1 compiles and the others wait for it."""
    of_rank = evidence.ranks[1]
    sight = ProcessActivity(pid=of_rank.pid or 0, state="S", interval_s=3.0, **process)
    stacks = (_stack(*STACKS["waits for the C++ compiler"][1]),)
    changed = replace(of_rank, stacks=stacks, earlier_stacks=stacks, process=sight, beat_age_s=9.0)
    return replace(evidence, ranks={**evidence.ranks, 1: changed})


@pytest.mark.parametrize("sight", [(1.0, 30), (0.0, 0)], ids=["computes", "waits"])
def test_a_compiling_rank_has_a_longer_budget_and_is_then_reported_as_compiling(
    sight: tuple[float, int],
) -> None:
    share, switches = sight
    evidence = _compiling(
        load("data_spin"), cpu_share=share, switches=switches, read_bytes=0, written_bytes=0
    )
    assert judged(evidence, later_s=30.0).verdicts == ()
    (verdict,) = judged(evidence, later_s=70.0).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("compiling", "slow", (1,))
    assert "compiles (torch.compile)" in verdict.cause
    assert "train.py:3" in str(verdict.place)
    (verdict,) = judged(evidence, later_s=700.0).verdicts
    assert (verdict.kind, verdict.level) == ("compiling", "stalled")


def test_a_rank_that_compiles_without_a_processor_has_a_longer_budget() -> None:
    busy = _compiling(load("data_spin"), cpu_share=0.14, switches=30)
    starved = _compiling(load("data_spin"), cpu_share=0.14, switches=30, run_delay_share=0.8)
    assert judged(busy, later_s=100.0).verdicts
    assert judged(starved, later_s=100.0).verdicts == ()
    (verdict,) = judged(starved, later_s=300.0).verdicts
    assert (verdict.kind, verdict.level) == ("compiling", "slow")


def test_no_rank_is_blamed_if_all_ranks_compile() -> None:
    evidence = _compiling(load("data_spin"), cpu_share=1.0, switches=30)
    of_rank = evidence.ranks[1]
    ranks = {r: replace(of_rank, rank=r, pid=e.pid) for r, e in evidence.ranks.items()}
    every = replace(evidence, ranks=ranks)
    assert judged(every, later_s=30.0).verdicts == ()
    (verdict,) = judged(every, later_s=70.0).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("compiling", "slow", ())
