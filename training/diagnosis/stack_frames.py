"""Classify the frames of a stack: user code or library, and what the thread waits for. Pure.

Detect from the frames of a stack that a thread is compiling. A compilation takes seconds to
minutes. It computes without a pause or waits for a C++ compiler, may hold the GIL, and may happen
on one rank while another finds its result in a cache. So it resembles a busy loop, a frozen rank or
a held GIL. Compiled code runs through files of the same packages, so the functions are compared
too, not only the packages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ltui.training.diagnosis.evidence import Frame, RankEvidence, ThreadStack

_COMPILERS: tuple[tuple[str, re.Pattern[str], re.Pattern[str]], ...] = (
    # The first call imports the compiler, which takes seconds, or half a minute on a busy machine.
    # It returns before anything is compiled. Of a deep stack the outermost frames are not known.
    ("torch.compile", re.compile(r"/torch/__init__\.py$"), re.compile("^compile$")),
    ("torch.compile", re.compile(r"/torch/_(dynamo|inductor)/.*\.py$"), re.compile("^<module>$")),
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
    # They run the C++ compiler, or wait for the processes and the lock with which code is compiled.
    (
        "torch.compile",
        re.compile(r"/torch/_inductor/(cpp_builder|async_compile)\.py$"),
        re.compile(""),
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

    It runs in the main thread. Or it is Numba in another thread, where data loaders compile their
    pipelines. In the backward pass it may be any in a thread of autograd, for which the main thread
    waits.
    """
    if (name := compiler_on_stack(rank_evidence.main_stack)) is not None:
        return name
    others = {compiler_on_stack(s) for s in rank_evidence.stacks if not s.main} - {None}
    if not in_backward(rank_evidence.main_stack):
        others &= {"Numba"}
    return min((name for name in others if name is not None), default=None)


_LIBRARIES = re.compile(
    r"(/site-packages/|/dist-packages/|/lib/python3[^/]*/|^<frozen|^<string>|/ltui/training/|"
    r"/rank-side/[0-9a-f]+/|importlib/_bootstrap|"
    # Files that torch.compile writes into a folder of the user's choice.
    r"/torchinductor_|/c[a-z2-7]{51}\.py$|^<eval_with_key>)"
)
_COLLECTIVES = frozenset(
    """all_reduce broadcast barrier monitored_barrier all_gather all_gather_into_tensor
    all_gather_object broadcast_object_list reduce reduce_scatter reduce_scatter_tensor gather
    scatter all_to_all all_to_all_single gather_object scatter_object_list""".split()  # noqa: SIM905
)
_POINT_TO_POINT_CALLS = frozenset(
    "recv send recv_object_list send_object_list batch_isend_irecv".split()  # noqa: SIM905
)
_RENDEZVOUS = frozenset(
    """init_process_group rendezvous _new_process_group_helper _store_based_barrier next_rendezvous
    _create_c10d_store _env_rendezvous_handler setup_distributed _init_dist_connection
    new_group""".split()  # noqa: SIM905
)
_CHILD_FILES = ("/subprocess.py", "/popen_fork.py")
_CHILD_WAITS = frozenset({"wait", "_wait", "communicate", "_communicate", "poll"})
_GPU_FILES = ("/torch/cuda/", "/torch/accelerator/")
_LOADER_WAIT = frozenset({"_try_get_data", "_get_data"})
"""Functions of torch's ``dataloader.py`` in which a rank waits for a worker."""


def is_library_file(file: str, torch_dir: object = None) -> bool:
    """Return True if the file is not user code.

    ``torch_dir``: the folder of torch as a rank has sent it; torch may be built in a folder of any
    name.
    """
    in_torch = isinstance(torch_dir, str) and len(torch_dir) > 1 and file.startswith(torch_dir)
    return in_torch or bool(_LIBRARIES.search(file))


def call_site(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of user code, or else the innermost frame outside of torch."""
    for frame in frames:
        if not is_library_file(frame.file):
            return frame
    return next((f for f in frames if "/torch/" not in f.file), None)


def user_frame(stack: ThreadStack | None) -> Frame | None:
    """Return the innermost frame of user code.

    Return None if the only user code is the script's call of ``fit``.
    """
    if stack is None:
        return None
    user_frames = [f for f in stack.frames if not is_library_file(f.file)]
    if not user_frames:
        return None
    calls_fit = any("/trainer/trainer.py" in f.file for f in stack.frames)
    only_the_script = calls_fit and all(_is_outside_fit(stack, f) for f in user_frames)
    return None if only_the_script else user_frames[0]


def _is_outside_fit(stack: ThreadStack, frame: Frame) -> bool:
    """Return True if the frame called ``fit`` and was not called by it."""
    index = stack.frames.index(frame)
    return not any("/trainer/trainer.py" in f.file for f in stack.frames[index + 1 :])


def collective_in(stack: ThreadStack | None) -> str | None:
    """Return the name of the collective that the thread is in, by its frames, or None."""
    return _call_in(stack, _COLLECTIVES, "distributed_c10d.py")


def point_to_point_call_in(stack: ThreadStack | None) -> str | None:
    """Return the name of the send or receive call that the thread is in, or None."""
    return _call_in(stack, _POINT_TO_POINT_CALLS, "distributed_c10d.py")


def in_rendezvous(stack: ThreadStack | None) -> bool:
    """Return True if the thread waits for other ranks to join a process group."""
    return _call_in(stack, _RENDEZVOUS, "/torch/distributed/") is not None


def waits_for_loader(stack: ThreadStack | None) -> bool:
    """Return True if the rank waits for the workers of its DataLoader."""
    return _call_in(stack, _LOADER_WAIT, "utils/data/dataloader.py") is not None


def waits_for_child(stack: ThreadStack | None) -> bool:
    """Return True if the thread waits for a child process to end or to write."""
    return any(_call_in(stack, _CHILD_WAITS, file) is not None for file in _CHILD_FILES)


def in_gpu_synchronization(stack: ThreadStack | None) -> bool:
    """Return True if the thread waits in a call of ``synchronize`` for a device, stream or event.

    Other waits for a GPU have no frame of their own.
    """
    return any(_call_in(stack, ("synchronize",), file) is not None for file in _GPU_FILES)


def in_backward(stack: ThreadStack | None) -> bool:
    """Return True if the thread runs autograd's backward pass."""
    return has_frame(stack, "_engine_run_backward")


def has_frame(stack: ThreadStack | None, *functions: str) -> bool:
    """Return True if the stack contains a call of one of ``functions``."""
    return _call_in(stack, functions, "") is not None


def _call_in(stack: ThreadStack | None, functions: Collection[str], file: str) -> str | None:
    """Return the innermost of ``functions`` that is called in a file whose path contains ``file``.

    Return None if the thread calls none of them.
    """
    frames = stack.frames if stack is not None else ()
    return next((f.function for f in frames if f.function in functions and file in f.file), None)


def frame_text(frame: Frame | None) -> str | None:
    """Return ``train.py:31 in training_step``, or None for no frame."""
    if frame is None:
        return None
    return f"{frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}"


def at_frame(frame: Frame | None) -> str:
    """Return `` at train.py:31 in training_step``; empty for no frame."""
    return f" at {frame_text(frame)}" if frame is not None else ""


def frame_facts(frame: Frame | None) -> dict[str, Any]:
    """Return the frame as the evidence of a verdict contains it; empty for no frame."""
    return {"frame": f"{frame.file}:{frame.line} {frame.function}"} if frame is not None else {}


def innermost_frame(stack: ThreadStack | None) -> Frame | None:
    return stack.frames[0] if stack and stack.frames else None


def in_same_function(stacks: Iterable[ThreadStack]) -> bool:
    """Return True if all stacks are in the same function of user code, such as one loop.

    Return False for fewer than two stacks.
    """
    frames = [user_frame(s) for s in stacks]
    return len(frames) > 1 and len({(f.file, f.function) if f else None for f in frames}) == 1
