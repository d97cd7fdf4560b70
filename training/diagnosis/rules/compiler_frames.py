"""Whether a thread is compiling, by the frames of its stack. Pure.

A compilation takes seconds to minutes, computes without a pause or waits for a C++ compiler, may
hold the GIL, and happens on one rank where another finds its result in a cache: it looks like a
busy loop, a frozen rank or a held GIL, and is none. What has been compiled runs through files of
the same packages, so functions count, not packages.
"""

from __future__ import annotations

import re

from ltui.training.diagnosis.evidence import RankEvidence, ThreadStack

_COMPILERS: tuple[tuple[str, re.Pattern[str], re.Pattern[str]], ...] = (
    # Called on a miss alone; what is compiled returns from it before it runs.
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
    # Machine code is called without a frame of numba's, but for one that turns back to Python.
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
    """What the thread compiles with: ``torch.compile``, ``Triton``, ``Numba``; None: it doesn't."""
    for frame in stack.frames if stack is not None else ():
        for name, files, functions in _COMPILERS:
            if files.search(frame.file) and functions.search(frame.function):
                return name
    return None


def active_compiler(of_rank: RankEvidence) -> str | None:
    """What the rank waits for: its main thread's compiler, else Numba in another thread, where
    loaders compile their pipelines."""
    if (name := compiler_on_stack(of_rank.main_stack)) is not None:
        return name
    others = {compiler_on_stack(s) for s in of_rank.stacks if not s.main}
    return "Numba" if "Numba" in others else None
