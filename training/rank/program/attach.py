"""The entry point of torch's backend extensions: it watches a program that has no Trainer.

``import torch`` loads every entry point of the group ``torch.backends``, unless
TORCH_DEVICE_BACKEND_AUTOLOAD is 0. An entry point that raises would end the user's script, so this
one never raises. It registers a hook, which is called after the first step of an optimizer, and
watches the libraries by which programs log values. A process that imports torch and trains nothing
is not touched further.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KERAS = "keras.src.backend.torch"
"""The module that Keras 3 imports if torch is its backend."""

_handle: Any = None
_libraries: Any = None
_after_step: Callable[[Any, Any, Any], None]


def attach() -> None:
    """Await the first step of an optimizer, if this process belongs to a run."""
    global _libraries
    if not (os.environ.get("LTUI_RUN_DIR") and os.environ.get("LTUI_RUN_ID")):
        return
    with contextlib.suppress(Exception):  # an old torch has no such hook
        call_after_steps(_after_first_step)
    with contextlib.suppress(Exception):
        # Imported here, because most processes do not belong to a run.
        from ltui.training.rank.program.import_watch import ImportWatch
        from ltui.training.rank.program.logged_values import logged_values
        from ltui.training.rank.program.logging_libraries import recording_functions

        record_logs = recording_functions(logged_values.record)
        _libraries = ImportWatch(
            [
                *record_logs,
                ("transformers.trainer", _adapt_trainer),
                (KERAS, lambda _: _mark("keras")),
            ]
        )
        _libraries.install()
        logged_values.stepless = _open_stepless
        _call_at_exit()
    with contextlib.suppress(Exception):
        _mark("torch")
    if pattern := os.environ.get("LTUI_METRICS_PATTERN"):
        with contextlib.suppress(Exception):
            from ltui.training.rank.program.logged_values import logged_values
            from ltui.training.rank.program.metric_pattern import metric_pattern
            from ltui.training.rank.program.printed_values import record_printed_values

            record_printed_values(metric_pattern(pattern), logged_values.record)


def _open_stepless() -> Any:
    # Imported here, because most processes that import torch log nothing.
    from ltui.training.rank.program.stepless_program import open_stepless

    return open_stepless()


def _call_at_exit() -> None:
    """Send what this process has logged by its end if it has made no step."""
    from ltui.training.rank.program.logged_values import logged_values

    pid = os.getpid()

    def at_exit() -> None:
        pattern = os.environ.get("LTUI_METRICS_PATTERN")
        if pid == os.getpid() and (pattern or logged_values.has_waiting):
            with contextlib.suppress(Exception):  # the program itself has ended as it should
                from ltui.training.rank.program.stepless_program import send_at_exit

                send_at_exit()

    if multiprocessing.parent_process() is None:
        atexit.register(at_exit)
    else:  # a child of multiprocessing ends without the functions of atexit
        multiprocessing.util.Finalize(None, at_exit, exitpriority=0)


def _mark(library: str) -> None:
    """Tell the supervisor that this process has imported a library, by an empty file."""
    folder = Path(os.environ["LTUI_RUN_DIR"], "queue", os.environ["LTUI_ATTEMPT"])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / f"{library}-{os.getpid()}.imported").touch(mode=0o600)


def _adapt_trainer(module: Any) -> None:
    from ltui.training.rank.program.hugging_face import adapt_trainer

    adapt_trainer(module)


def call_after_steps(function: Callable[[Any, Any, Any], None]) -> None:
    """Call ``function`` after each step of an optimizer, and no other that was passed before.

    The hook itself stays in its place: torch calls the hooks while it iterates over them, and a
    change of their number then would be an error of the user's script.
    """
    global _handle, _after_step
    _after_step = function
    if _handle is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _handle = register_optimizer_step_post_hook(_hook)


def _hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    _after_step(optimizer, args, kwargs)


def ignore_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Do nothing after a step."""


def _after_first_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    call_after_steps(ignore_step)
    try:
        uncompiled(_start)(optimizer)
    except Exception as error:  # noqa: BLE001  (ltui must not make a user's script fail)
        print(f"ltui: no telemetry: {type(error).__name__}: {error}", file=sys.stderr)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiled code may call without compiling it, which takes seconds."""
    import torch  # torch itself imports this module

    excluded: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return excluded


def _start(optimizer: Any) -> None:
    # Imported here, because few of the processes that import torch train.
    from ltui.training.rank.program.program_rank import start

    if _libraries is not None:
        _libraries.catch_up()
    start(optimizer)
