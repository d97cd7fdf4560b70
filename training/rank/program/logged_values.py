"""The values that a program without a Trainer logs, until they are sent.

A value is sent with the step that ltui counts, because all curves of a run share one axis. A
program may number its values by epochs, samples or micro-batches, or count on from another number
after it continued from a checkpoint of its own. Its number is used where it counts the same steps.

The queue of a rank has one writer. So values that another thread logs wait for the training thread,
as do those that are logged before the first step, when it is not known if this process is a rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from ltui.training.rank.channel import Channel
    from ltui.training.rank.metric_records import MetricSender

STEPLESS_S = 20.0
"""Seconds after its first value in which a program makes no step, after which it may have none."""
MAX_WAITING = 20_000
"""Calls whose values wait to be sent. If there are more, the oldest are dropped and counted."""
_STEPS_APART = 1
"""How far a program's count of the same steps may differ from ltui's: it may begin at zero, and
log before or after the optimizer's step."""

Values = dict[str, float | torch.Tensor]
Send = Callable[[Values, int, float], None]
"""Sends values with their step and unix time."""


class LoggedValues:
    """Collects the values that this process logs, and sends them once it is a rank."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Values, int, float, int]] = deque(maxlen=MAX_WAITING)
        """Values with their step, their unix time, and their step in a program without steps."""
        self.stepless: Callable[[], Send | None] | None = None
        """Opens the way for the values of a program without steps."""
        self._wanted = True
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._waiting.clear()
        self.dropped = self._reported = 0
        """Number of calls whose values were dropped, and how many of them were reported."""
        self._newest: dict[str, tuple[int, float | None]] = {}
        """Step of the newest value of each metric, and the value if it is not on a GPU."""
        self._send: Send | None = None
        self._is_stepless = False
        self._calls = self._newest_own = 0
        """How often this process has logged, and the newest step in a program without steps."""
        self._first_at: float | None = None
        """Unix time of the first value."""
        self._current_step: Callable[[], int] = int
        self._thread = 0

    def begin(self, send: Send, current_step: Callable[[], int]) -> None:
        """Call ``send`` in this thread for what waits and for what is recorded from now on.

        The first step is over, and ``current_step`` is its number. What waits was logged before it.
        """
        self._send, self._current_step = send, current_step
        self._thread = threading.get_ident()
        first_place = current_step() - 1
        self._is_stepless = False
        for _ in range(len(self._waiting)):
            values, place, t, _own = self._waiting.popleft()
            send(values, max(place, first_place), t)

    def begin_stepless(self) -> None:
        """Send what waits and what is recorded from now on, because this program has no steps.

        The axis is the program's own number, or else counts the calls.
        """
        if self._send is None and self._waiting and self.stepless is not None:
            self._send, self._thread = self.stepless(), threading.get_ident()
            self._is_stepless = self._send is not None
            self._first_at = time.time()  # if a rank exists, ask again later

    def end(self) -> None:
        """Record nothing any more."""
        self._wanted = False
        self._reset()

    def record(self, values: Mapping[str, Any], step: Any = None) -> None:
        """Record ``values``, which the program logged with its number ``step``.

        What is no number is left out, and so is a value that the program logs twice, such as to two
        libraries.
        """
        if not self._wanted:
            return
        place = _place(step, self._current_step())
        new: Values = {}
        for name, value in values.items():
            number = _number(value)
            if number is None:
                continue
            known = number if type(number) is float else None
            newest = self._newest.get(name)
            if newest is not None:
                place = max(place, newest[0])  # a curve does not go back
                if known is not None and newest == (place, known) and not self._is_stepless:
                    continue
            self._newest[name] = place, known
            new[str(name)] = number
        if new:
            self.dropped += len(self._waiting) == MAX_WAITING
            now = time.time()
            self._calls += 1
            own = _number(step)
            if not isinstance(own, float) or not 1 <= own < 2**53:
                own = self._calls
            self._newest_own = max(self._newest_own, int(own))
            self._waiting.append((new, place, now, self._newest_own))
            if self._first_at is None:
                self._first_at = now
            if self._send is None and now - self._first_at > STEPLESS_S:
                self.begin_stepless()
            if threading.get_ident() == self._thread:
                self.send_waiting()

    def report_dropped(self, channel: Channel, *, at_end: bool = False) -> None:
        """Send once that calls were dropped, and at the end how many, if there were more."""
        if self.dropped > self._reported and (at_end or not self._reported):
            self._reported = self.dropped
            text = (
                f"{self.dropped:,} calls that log values were dropped: more than "
                f"{MAX_WAITING:,} waited to be sent."
            )
            channel.event("note", text, dropped=self.dropped)

    @property
    def has_waiting(self) -> bool:
        """True if values wait to be sent."""
        return bool(self._waiting)

    def send_waiting(self) -> None:
        """Send what waits. Called by the training thread."""
        while self._waiting and self._send is not None:
            values, place, t, own = self._waiting.popleft()
            self._send(values, own if self._is_stepless else place, t)


def send_through(channel: Channel, sender: MetricSender) -> Send:
    """Return a function that sends values, and once the reason if some cannot be sent."""
    is_failing = False

    def send(values: Values, step: int, t: float) -> None:
        nonlocal is_failing
        try:
            epoch = channel.pulse.epoch
            sender.send(values, step, epoch if epoch >= 0 else None, t)
        except Exception as error:  # noqa: BLE001  (such as a record that is too large)
            if not is_failing:
                is_failing = True
                reason = f"{type(error).__name__}: {error}"
                channel.event("note", f"Values that the program logged are missing ({reason}).")

    return send


def _place(step: Any, own_step: int) -> int:
    """Return the step of a value that the program logs with its number ``step``."""
    number = _number(step)
    if isinstance(number, float) and abs(number - own_step) <= _STEPS_APART:
        return int(number)
    return own_step


def _number(value: Any) -> float | torch.Tensor | None:
    """Return a value that a curve can show, else None. A value on a GPU is not waited for."""
    if type(value) is float:
        return value
    try:
        if isinstance(value, torch.Tensor):
            return _tensor_number(value)
        if isinstance(value, (str, bytes)):
            return None
        return float(value.item() if hasattr(value, "item") else value)
    except Exception:  # noqa: BLE001  (an image, a complex number, an object of another library)
        return None


def _tensor_number(value: torch.Tensor) -> float | torch.Tensor | None:
    # Reading a distributed tensor, which is a class of its own, is a collective.
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.numel() != 1:
        return None
    if value.is_cuda:
        return value.detach().to(torch.float64, copy=True)
    return float(value.detach()) if value.device.type == "cpu" else None


logged_values = LoggedValues()
"""The logged values of this process."""


Record = Callable[[Mapping[str, Any], Any], None]


class Logged(NamedTuple):
    """What one call logs."""

    values: Mapping[str, Any]
    step: Any = None
    """The program's own number of the step; None if it gives none."""
    other_names: frozenset[str] = frozenset()
    """Further names by which the call may pass the values on to other libraries."""


# The functions by which programs log values. Each is replaced by one that calls it, and then
# records what was logged. The functions here have the parameters of the library's function.


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
