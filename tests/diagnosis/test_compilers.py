"""A rank that compiles is neither in a busy loop nor frozen, and holds no GIL worth a word."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.diagnosis.collective_positions import collective_on_stack
from ltui.training.diagnosis.evidence import Evidence, Frame, RankEvidence, ThreadStack
from ltui.training.diagnosis.stack_frames import active_compiler, compiler_on_stack, user_frame
from tests.diagnosis.machines import process, stack, with_each, with_rank
from tests.diagnosis.recordings import judged, load

_FOLDERS = {
    "torch": "/env/lib/python3/site-packages/",
    "triton": "/env/lib/python3/site-packages/",
    "sympy": "/env/lib/python3/site-packages/",
    "filelock": "/env/lib/python3/site-packages/",
    "cgv3ti2gs2n2xjzxpcs5l7chfgjdmdv5a3ke3dyk66x35gn3tieu.py": "/tmp/kernels/gv/",
    "subprocess.py": "/usr/lib/python3.11/",
    "train.py": "/home/user/project/",
}
_CALLED = """torch/_dynamo/eval_frame.py compile_wrapper
    torch/nn/modules/module.py _call_impl
    train.py training_step"""
_KERNEL = "cgv3ti2gs2n2xjzxpcs5l7chfgjdmdv5a3ke3dyk66x35gn3tieu.py call"
STACKS: dict[str, tuple[str | None, str]] = {
    "imports the compiler": (
        "torch.compile",
        """sympy/core/numbers.py <module>
        torch/_dynamo/eval_frame.py optimize
        torch/__init__.py compile
        train.py training_step""",
    ),
    "imports the compiler, with more frames than are known": (
        "torch.compile",
        """sympy/core/numbers.py <module>
        torch/_inductor/sizevars.py <module>""",
    ),
    "waits for the C++ compiler": (
        "torch.compile",
        f"""subprocess.py communicate
        torch/_inductor/cpp_builder.py run_compile_cmd
        torch/_inductor/compile_fx.py codegen_and_compile
        torch/_inductor/compile_fx.py compile_fx
        torch/_dynamo/output_graph.py call_user_compiler
        torch/_dynamo/convert_frame.py _compile
        {_CALLED}""",
    ),
    "compiles the backward": (
        "torch.compile",
        """torch/_inductor/compile_fx.py compile_fx_inner
        torch/_functorch/_aot_autograd/runtime_wrappers.py _backward_impl
        torch/autograd/graph.py _engine_run_backward""",
    ),
    "waits in the backward for the process that compiles": (
        "torch.compile",
        f"""filelock/_api.py _poll_until_acquired
        torch/_inductor/codecache.py future
        torch/_inductor/async_compile.py cpp_pybinding
        {_KERNEL.removesuffix("call")}<module>
        torch/_inductor/runtime/compile_tasks.py _reload_python_module
        torch/autograd/graph.py _engine_run_backward""",
    ),
    "runs what was compiled": (
        None,
        f"""{_KERNEL}
        torch/_inductor/output_code.py __call__
        torch/_functorch/_aot_autograd/runtime_wrappers.py runtime_wrapper
        {_CALLED}""",
    ),
    "tunes a kernel": (
        "Triton",
        f"""torch/_inductor/runtime/triton_heuristics.py benchmark_all_configs
        torch/_inductor/runtime/triton_heuristics.py run
        {_KERNEL}
        {_CALLED}""",
    ),
    "launches a kernel": (
        None,
        f"""torch/_inductor/runtime/triton_heuristics.py run
        {_KERNEL}
        {_CALLED}""",
    ),
    "compiles a kernel": (
        "Triton",
        """triton/backends/nvidia/compiler.py make_cubin
        triton/compiler/compiler.py compile
        triton/runtime/jit.py run
        train.py training_step""",
    ),
    "launches its own kernel": (
        None,
        """triton/backends/nvidia/driver.py __call__
        triton/runtime/jit.py run
        train.py training_step""",
    ),
}
"""Name -> the compiler that runs, and the file and function of each frame."""


def _stack(*frames: tuple[str, str]) -> ThreadStack:
    return stack(*(Frame(file=file, line=3, function=function) for file, function in frames))


def _stack_of(lines: str) -> ThreadStack:
    frames = (line.split() for line in lines.splitlines())
    return _stack(
        *((f"{_FOLDERS[file.split('/')[0]]}{file}", function) for file, function in frames)
    )


@pytest.mark.parametrize(("name", "lines"), STACKS.values(), ids=STACKS)
def test_compiling_is_distinguished_from_running(name: str | None, lines: str) -> None:
    stack = _stack_of(lines)
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


def _compiling(**activity: Any) -> Evidence:
    """Return evidence in which rank 1 compiles and the others wait for it."""
    stacks = (_stack_of(STACKS["waits for the C++ compiler"][1]),)
    evidence = load("data_spin")
    own = process(evidence.ranks[1].pid or 0, interval_s=3.0, **activity)
    return with_rank(evidence, 1, stacks=stacks, earlier_stacks=stacks, process=own, beat_age_s=9.0)


@pytest.mark.parametrize(("share", "switches"), [(1.0, 30), (0.0, 0)], ids=["computes", "waits"])
def test_a_compiling_rank_has_a_longer_budget_and_is_then_reported_as_compiling(
    share: float, switches: int
) -> None:
    evidence = _compiling(cpu_share=share, switches=switches, read_bytes=0, written_bytes=0)
    assert judged(evidence, later_s=30.0).verdicts == ()
    (verdict,) = judged(evidence, later_s=70.0).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("compiling", "slow", (1,))
    assert "compiles (torch.compile)" in verdict.cause
    assert "train.py:3" in str(verdict.place)
    (verdict,) = judged(evidence, later_s=700.0).verdicts
    assert (verdict.kind, verdict.level) == ("compiling", "stalled")


def test_a_rank_that_compiles_without_a_processor_has_a_longer_budget() -> None:
    busy = _compiling(cpu_share=0.14, switches=30)
    starved = _compiling(cpu_share=0.14, switches=30, run_delay_share=0.8)
    assert judged(busy, later_s=100.0).verdicts
    assert judged(starved, later_s=100.0).verdicts == ()
    (verdict,) = judged(starved, later_s=300.0).verdicts
    assert (verdict.kind, verdict.level) == ("compiling", "slow")


def test_no_rank_is_blamed_if_all_ranks_compile() -> None:
    evidence = _compiling(cpu_share=1.0, switches=30)
    of_rank = evidence.ranks[1]
    ranks = {r: replace(of_rank, rank=r, pid=e.pid) for r, e in evidence.ranks.items()}
    every = replace(evidence, ranks=ranks)
    assert judged(every, later_s=30.0).verdicts == ()
    (verdict,) = judged(every, later_s=70.0).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("compiling", "slow", ())


_IN_BACKWARD = _stack_of("torch/autograd/graph.py _engine_run_backward")


@pytest.mark.parametrize("thread", ["main", "autograd"])
@pytest.mark.parametrize("pending", [False, True], ids=["nothing pending", "a bucket pending"])
def test_a_network_is_not_blamed_if_all_ranks_compile_their_backward_pass(
    thread: str, pending: bool
) -> None:
    compiles = _stack_of(STACKS["waits in the backward for the process that compiles"][1])
    others = (replace(compiles, main=False), _IN_BACKWARD)
    stacks = (compiles,) if thread == "main" else others
    evidence = load("data_spin")
    begun = evidence.ranks[0].collectives if pending else ()
    last = evidence.ranks[0].last_enqueued if pending else {}
    fields = {"phase": "backward", "collectives": begun, "last_enqueued": last, "stacks": stacks}
    every = with_each(evidence, process=process(interval_s=3.0), **fields)
    assert judged(every, later_s=30.0).verdicts == ()
    (verdict,) = judged(every, later_s=70.0).verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("compiling", "slow", ())
    waits = with_rank(every, 2, stacks=(_IN_BACKWARD,))
    (verdict,) = judged(waits, later_s=70.0).verdicts
    assert (verdict.kind, verdict.culprits, verdict.waiting) == ("compiling", (0, 1), (2,))
    none_compile = with_each(every, stacks=(_IN_BACKWARD,))
    (verdict,) = judged(none_compile, later_s=30.0).verdicts
    assert verdict.kind == "transport"


def test_a_compiler_beside_a_collective_does_not_hide_the_wait() -> None:
    in_call = _stack_of(
        """torch/distributed/distributed_c10d.py all_reduce
        train.py training_step"""
    )
    compiles = replace(_stack_of(STACKS["compiles the backward"][1]), main=False)
    beside = RankEvidence(rank=0, stacks=(in_call, compiles))
    assert active_compiler(beside) is None
    assert collective_on_stack(beside) == "all_reduce"
