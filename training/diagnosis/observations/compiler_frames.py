"""Detect from the frames of a stack that a thread is compiling. Pure.

A compilation takes seconds to minutes. It computes without a pause or waits for a C++ compiler, may
hold the GIL, and may happen on one rank while another finds its result in a cache. So it resembles
a busy loop, a frozen rank or a held GIL. Compiled code runs through files of the same packages, so
the functions are compared too, not only the packages.
"""

from __future__ import annotations

import re

from ltui.training.diagnosis.evidence import RankEvidence, ThreadStack

_COMPILERS: tuple[tuple[str, re.Pattern[str], re.Pattern[str]], ...] = (
    # Called only on a cache miss. It returns before the compiled code runs.
    ("torch.compile", re.compile(r"/torch/_dynamo/convert_frame\.py$"), re.compile("")),
    # The backward is compiled at its first call, from within the running graph.
    (
        "torch.compile",
        re.compile(r"/torch/_(inductor|functorch)/.*\.py$"),
        re.compile(
            r"^_?(compile_fx|codegen_and_compile|fw_compiler|bw_compiler|compile_to_module)"
        ),
    ),
    (
        "Triton",
        re.compile(r"/torch/_inductor/runtime/triton_heuristics\.py$"),
        re.compile(r"^(_precompile|precompile|autotune_to_one|benchmark_all|coordinate_descent)"),
    ),
    ("Triton", re.compile(r"/triton/(compiler/|backends/[^/]+/compiler\.py$)"), re.compile("")),
    ("Triton", re.compile(r"/triton/runtime/autotuner\.py$"), re.compile("^_?bench")),
    # Machine code runs without a frame of numba's, unless it calls back into Python.
    (
        "Numba",
        re.compile(r"/numba/core/(dispatcher|compiler|compiler_machinery|compiler_lock)\.py$"),
        re.compile(r"^(_?compile|run$|_runPass$|check$|_acquire_compile_lock$)"),
    ),
    (
        "a C++ extension",
        re.compile(r"/torch/utils/cpp_extension\.py$"),
        re.compile(r"^(_run_ninja_build|_write_ninja_file_and)"),
    ),
)


def compiler_on_stack(stack: ThreadStack | None) -> str | None:
    """Return the compiler that the thread runs, such as ``torch.compile``, or None."""
    for frame in stack.frames if stack is not None else ():
        for name, files, functions in _COMPILERS:
            if files.search(frame.file) and functions.search(frame.function):
                return name
    return None


def active_compiler(rank_evidence: RankEvidence) -> str | None:
    """Return the compiler that the rank waits for, or None.

    It runs in the main thread, or it is Numba in another thread, where data loaders compile their
    pipelines.
    """
    if (name := compiler_on_stack(rank_evidence.main_stack)) is not None:
        return name
    other_compilers = {compiler_on_stack(s) for s in rank_evidence.stacks if not s.main}
    return "Numba" if "Numba" in other_compilers else None
