"""The entry point of torch's backend extensions: it watches a program that has no Trainer.

``import torch`` loads every entry point of the group ``torch.backends``, unless
TORCH_DEVICE_BACKEND_AUTOLOAD is 0. An entry point that raises would end the user's script, so this
one never raises. It registers a hook, which is called after the first step of an optimizer, and
watches the libraries by which programs log values. A process that imports torch and trains nothing
is not touched further.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from ltui.training.rank.program.program_hooks import (
    KERAS,
    ImportWatch,
    call_after_steps,
    call_at_exit,
    ignore_step,
    mark_process,
    uncompiled,
)

_libraries: ImportWatch | None = None


def attach() -> None:
    """Await the first step of an optimizer, if this process belongs to a run."""
    global _libraries
    if not (os.environ.get("LTUI_RUN_DIR") and os.environ.get("LTUI_RUN_ID")):
        return
    pattern = os.environ.get("LTUI_METRICS_PATTERN")
    with contextlib.suppress(Exception):  # an old torch has no such hook
        call_after_steps(_after_first_step)
    with contextlib.suppress(Exception):
        # Imported here, because most processes do not belong to a run.
        from ltui.training.rank.program.logged_values import logged_values, recording_functions

        _libraries = ImportWatch(
            [
                *recording_functions(logged_values.record),
                ("transformers.trainer", _adapt_trainer),
                (f"{KERAS}.trainer", _mark_keras_fits),
            ]
        )
        _libraries.install()
        logged_values.stepless = _open_stepless
        _send_at_exit(lambda: bool(pattern or logged_values.has_waiting))
    with contextlib.suppress(Exception):
        mark_process("torch")
    if os.environ.get("LTUI_RERUN"):
        # Imported here, because few runs execute steps again. If this fails, so does the program:
        # it must not write what it has written before.
        from ltui.training.rank import silenced_writes, step_rerun  # noqa: F401

        silenced_writes.silence_program()
    if pattern:
        with contextlib.suppress(Exception):
            from ltui.training.rank.program import printed_values
            from ltui.training.rank.program.logged_values import logged_values

            find = printed_values.metric_pattern(pattern)
            printed_values.record_printed_values(find, logged_values.record)


def _mark_keras_fits(module: Any) -> None:
    """Tell when Keras trains by its own optimizers; its models may be trained by those of torch."""
    fit = module.TorchTrainer.fit

    @functools.wraps(fit)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # ltui must not make a user's script fail
            mark_process("keras")
        return fit(*args, **kwargs)

    module.TorchTrainer.fit = marked


def _open_stepless() -> Any:
    # Imported here, because most processes that import torch log nothing.
    from ltui.training.rank.program.process_role import open_stepless

    return open_stepless()


def _send_at_exit(has_values: Callable[[], bool]) -> None:
    """Send what this process has logged by its end if it has made no step."""
    pid = os.getpid()

    def at_exit() -> None:
        if pid == os.getpid() and has_values():
            with contextlib.suppress(Exception):  # the program itself has ended as it should
                from ltui.training.rank.program.process_role import send_at_exit

                send_at_exit()

    call_at_exit(at_exit)


def _adapt_trainer(module: Any) -> None:
    from ltui.training.rank.program.hugging_face import adapt_trainer

    adapt_trainer(module)


def _after_first_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    call_after_steps(ignore_step)
    try:
        uncompiled(_start)(optimizer)
    except Exception as error:  # noqa: BLE001  (ltui must not make a user's script fail)
        print(f"ltui: no telemetry: {type(error).__name__}: {error}", file=sys.stderr)


def _start(optimizer: Any) -> None:
    # Imported here, because few of the processes that import torch train.
    from ltui.training.rank.program.program_rank import start

    if _libraries is not None:
        _libraries.catch_up()
    start(optimizer)
