"""The functions by which programs log values: where they are, and what their arguments mean.

Each is replaced by a function that calls it, and then records what was logged. It returns what the
library returns, and raises what the library raises.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

Record = Callable[[Mapping[str, Any], Any], None]


class Logged(NamedTuple):
    """What one call logs."""

    values: Mapping[str, Any]
    step: Any = None
    """The program's own number of the step; None if it gives none."""
    other_names: frozenset[str] = frozenset()
    """Further names by which the call may pass the values on to other libraries."""


# Each function has the parameters of the library's function that it is for.


def _add_scalar(
    writer: Any, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
) -> Logged:
    return Logged({_tag_name(writer, str(tag)): scalar_value}, global_step)


def _add_scalars(
    writer: Any,
    main_tag: Any,
    tag_scalar_dict: Mapping[str, Any],
    global_step: Any = None,
    *_: Any,
    **__: Any,
) -> Logged:
    values = {_tag_name(writer, f"{main_tag}/{n}"): v for n, v in tag_scalar_dict.items()}
    return Logged(values, global_step)


_tag_folders: dict[str, str] = {}
"""Tag -> folder of the first of TensorBoard's writers that wrote it."""


def _tag_name(writer: Any, tag: str) -> str:
    """Return the tag; with the name of the folder in front, if a writer of another wrote it first.

    A program may have a writer for training and one for validation, with the same tags.
    """
    folder = str(getattr(writer, "log_dir", None) or getattr(writer, "logdir", ""))
    if _tag_folders.setdefault(tag, folder) == folder:
        return tag
    return f"{os.path.basename(os.path.normpath(folder))}/{tag}"


def _wandb_log(_run: Any, data: Any, step: Any = None, *_: Any, **__: Any) -> Logged:
    return Logged(dict(_flatten(data)), step)


def _log_metrics(_owner: Any, metrics: Any, step: Any = None, *_: Any, **__: Any) -> Logged:
    return Logged(dict(_flatten(metrics)), step)


def _accelerate_log(_accelerator: Any, values: Any, step: Any = None, *_: Any, **__: Any) -> Logged:
    return Logged(dict(_flatten(values)), step)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by names such as ``val.loss``, as Weights & Biases does."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _mlflow_metric(
    _client: Any,
    run_id: Any,  # noqa: ARG001
    key: str,
    value: Any,
    timestamp: Any = None,  # noqa: ARG001
    step: Any = None,
    *_: Any,
    **__: Any,
) -> Logged:
    return Logged({key: value}, step or None)  # MLflow writes 0 where no step is given


def _mlflow_batch(
    _client: Any,
    run_id: Any,  # noqa: ARG001
    metrics: Sequence[Any] = (),
    *_: Any,
    **__: Any,
) -> Logged:
    step = metrics[-1].step if metrics else None
    return Logged({metric.key: metric.value for metric in metrics}, step or None)


def _hugging_face_log(trainer: Any, logs: Mapping[str, Any], *_: Any, **__: Any) -> Logged:
    logs = {**logs, "epoch": trainer.state.epoch}
    values = {_hugging_face_name(name): value for name, value in logs.items()}
    return Logged(values, trainer.state.global_step, frozenset({*logs, "train/global_step"}))


def _hugging_face_name(name: str) -> str:
    """Return the name by which the Trainer reports a value to TensorBoard and others."""
    part, _, rest = name.partition("_")
    return f"{part}/{rest}" if part in ("eval", "test") and rest else f"train/{name}"


_WRITER = {"SummaryWriter.add_scalar": _add_scalar, "SummaryWriter.add_scalars": _add_scalars}
_FUNCTIONS: dict[str, dict[str, Callable[..., Logged]]] = {
    "torch.utils.tensorboard.writer": _WRITER,
    "tensorboardX.writer": _WRITER,
    "wandb.sdk.wandb_run": {"Run.log": _wandb_log},
    "trackio.run": {"Run.log": _log_metrics},
    "mlflow.tracking.client": {
        "MlflowClient.log_metric": _mlflow_metric,
        "MlflowClient.log_batch": _mlflow_batch,
    },
    "transformers.trainer": {"Trainer.log": _hugging_face_log},
    "lightning.fabric.fabric": {"Fabric.log_dict": _log_metrics},
    "lightning_fabric.fabric": {"Fabric.log_dict": _log_metrics},
    "accelerate.accelerator": {"Accelerator.log": _accelerate_log},
}
"""Module -> method of a class -> what a call of it logs. What other functions of these libraries
log passes through these methods."""


def recording_functions(record: Record) -> Iterator[tuple[str, Callable[[ModuleType], None]]]:
    """Yield modules, and functions that make a module call ``record`` with what is logged by it."""

    def replace(methods: Mapping[str, Callable[..., Logged]], module: ModuleType) -> None:
        for path, read in methods.items():
            class_name, _, name = path.partition(".")
            owner = getattr(module, class_name)
            setattr(owner, name, _recording(getattr(owner, name), read, record))

    for name, methods in _FUNCTIONS.items():
        yield name, functools.partial(replace, methods)


class _Thread(threading.local):
    names: frozenset[str] = frozenset()
    """Names of what the calls log within which this thread is."""


_thread = _Thread()


def _recording(
    function: Callable[..., Any], read: Callable[..., Logged], record: Record
) -> Callable[..., Any]:
    @functools.wraps(function)
    def recording(*args: Any, **kwargs: Any) -> Any:
        outer, logged = _thread.names, Logged({})
        with contextlib.suppress(Exception):  # wrong arguments, which the function reports
            logged = read(*args, **kwargs)
        _thread.names = outer.union(logged.values, logged.other_names)
        try:
            result = function(*args, **kwargs)
        finally:
            _thread.names = outer
        with contextlib.suppress(Exception):  # ltui must not make a user's script fail
            record({n: v for n, v in logged.values.items() if n not in outer}, logged.step)
        return result

    return recording
