# ruff: noqa: ARG002  (the arguments are Lightning's)
"""Warn at the start of a run about common causes of freezes, with a remedy for each.

This is a second callback in addition to ``callback.py``. Each check runs once. Then its hook is set
to None, which Lightning skips, so that it costs nothing in later steps. No check uses a collective:
the supervisor checks what needs the data of all ranks, such as different batch counts.

Find calls of ``self.log`` in a LightningModule's source that freeze ranks or lose values.
Synchronising a value (``sync_dist=True``) is a collective. If only rank 0 makes the call, it waits
for the other ranks forever. The check reads only the source text, before training begins. It does
not see calls whose arguments or conditions are variables.
"""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ltui.training.rank.lightning_internals import active_results, combined_loader, is_synchronised
from ltui.training.rank.source_changes import watch_sources
from ltui.training.shared.rank_environment import integer_variable

_LOG_METHODS = ("log", "log_dict")
_LIBRARIES = ("lightning", "pytorch_lightning", "torch", "torchmetrics", "builtins", "abc")
"""Packages whose classes are not checked."""
_RANK_ZERO_DECORATORS = ("rank_zero_only", "rank_zero_experiment")


class FreezeWarning(NamedTuple):
    """A possible cause of a freeze or of wrong figures, and what to do about it."""

    what: str
    remedy: str


def find_log_call_warnings(cls: type) -> list[FreezeWarning]:
    """Check the source of ``cls`` and of the user's classes that it inherits from."""
    warnings: list[FreezeWarning] = []
    for part in cls.__mro__:
        if part.__module__.partition(".")[0] in _LIBRARIES:
            continue
        try:
            lines, first_line = inspect.getsourcelines(part)
            tree = ast.parse(textwrap.dedent("".join(lines)))
            file = inspect.getsourcefile(part) or part.__module__
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        for call, on_one_rank in _log_calls(tree, on_one_rank=False):
            place = f"{file.rpartition('/')[2]}:{first_line + call.lineno - 1}"
            warnings += _check_call(call, on_one_rank, place)
    return list(dict.fromkeys(warnings))


def _check_call(call: ast.Call, on_one_rank: bool, place: str) -> Iterator[FreezeWarning]:
    synchronised = _has_true_argument(call, "sync_dist")
    if synchronised and on_one_rank:
        yield FreezeWarning(
            f"{place} logs with sync_dist=True in code that only one rank runs: that rank waits "
            "for the others forever.",
            "Log on every rank, or remove sync_dist there.",
        )
    elif synchronised and _has_true_argument(call, "rank_zero_only"):
        yield FreezeWarning(
            f"{place} logs with both sync_dist=True and rank_zero_only=True: only rank 0 would "
            "take part in the synchronisation.",
            "Keep sync_dist=True and remove rank_zero_only=True: Lightning writes the value only "
            "once anyway.",
        )


def _has_true_argument(call: ast.Call, name: str) -> bool:
    return any(
        k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in call.keywords
    )


def _log_calls(node: ast.AST, *, on_one_rank: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Yield every ``self.log(...)`` within ``node``, and True if only one rank reaches it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if node.func.attr in _LOG_METHODS and isinstance(owner, ast.Name) and owner.id == "self":
            yield node, on_one_rank
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        decorated = any(_has_name(d, _RANK_ZERO_DECORATORS) for d in node.decorator_list)
        on_one_rank = on_one_rank or decorated
    if isinstance(node, ast.If):
        yield from _log_calls(node.test, on_one_rank=on_one_rank)
        selects_one_rank = _selects_one_rank(node.test)
        for statement in node.body:
            yield from _log_calls(statement, on_one_rank=on_one_rank or selects_one_rank)
        for statement in node.orelse:
            yield from _log_calls(statement, on_one_rank=on_one_rank)
        return
    for child in ast.iter_child_nodes(node):
        yield from _log_calls(child, on_one_rank=on_one_rank)


def _selects_one_rank(test: ast.expr) -> bool:
    """Return True for ``self.trainer.is_global_zero``, ``self.global_rank == 0`` and the like.

    Their negations select the other ranks, so they return False.
    """
    if isinstance(test, ast.Compare):
        equal = len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
        return equal and _has_name(test.left, ("global_rank", "local_rank", "rank"))
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_selects_one_rank(value) for value in test.values)
    return _has_name(test, ("is_global_zero",))


def _has_name(node: ast.AST, names: tuple[str, ...]) -> bool:
    """Return True if a name, an attribute or a called function has one of ``names``."""
    target: Any = node.func if isinstance(node, ast.Call) else node
    name = getattr(target, "attr", None) or getattr(target, "id", None)
    return name in names


WORKERS_PER_CORE = 2
"""Loader workers for each CPU core above which they slow each other down."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (not our file: workers pass batches through it)
_MAX_PARTS = 1000
"""Parts of a nested batch that are searched for tensors."""


class FreezeWarningHooks:
    """Mixed with Lightning's ``Callback``. No error of a check is raised into training.

    Warnings are sent by the channel of ``rank_callback``.
    """

    # Lightning tests ``callable(hook)`` and skips a hook that is None: cheaper than an empty call.
    on_before_zero_grad = on_before_backward = on_after_backward = None
    on_before_optimizer_step = None

    def __init__(self, rank_callback: Any) -> None:
        self._rank_callback = rank_callback
        self._reported: set[FreezeWarning] = set()

    def _run_check(self, check: Callable[[], Iterator[FreezeWarning]]) -> None:
        """Send each new warning that ``check`` yields."""
        channel = self._rank_callback.channel
        try:
            for warning in check() if channel is not None else ():
                if warning not in self._reported:
                    self._reported.add(warning)
                    channel.event("warning", warning.what, remedy=warning.remedy)
        except Exception:  # noqa: BLE001, S110  (a failed check is not worth a report)
            pass

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        channel = self._rank_callback.channel
        if channel is not None:
            watch_sources(channel.warn_from_rank_0)
        if trainer.world_size > 1 and trainer.global_rank == 0:
            self._run_check(lambda: iter(find_log_call_warnings(type(pl_module))))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.local_rank == 0:
            self._run_check(lambda: _check_worker_count(trainer))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if trainer.local_rank == 0:
            self._run_check(lambda: _check_shared_memory(trainer, batch))
        self.on_train_batch_start = None  # type: ignore[assignment,method-assign]

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if trainer.global_rank == 0:
            self._run_check(lambda: _check_batch_size(trainer, batch, "training"))
            self._run_check(lambda: _check_contradictory_logging(trainer))
        self.on_train_batch_end = None  # type: ignore[assignment,method-assign]

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *index: Any
    ) -> None:
        if trainer.global_rank == 0:
            self._run_check(lambda: _check_batch_size(trainer, batch, "validation"))
        self.on_validation_batch_end = None  # type: ignore[assignment,method-assign]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size > 1 and trainer.global_rank == 0:
            self._run_check(lambda: _check_unsynchronised_logging(trainer))
            self._run_check(lambda: _check_contradictory_logging(trainer))
        self.on_validation_end = None  # type: ignore[assignment,method-assign]


def _ranks_here(trainer: Any) -> int:
    return max(integer_variable(os.environ, "LOCAL_WORLD_SIZE"), int(trainer.num_devices))


def _loaders_with_workers(trainer: Any) -> list[Any]:
    """Return the training loaders that have a ``num_workers``."""
    combined = combined_loader(trainer.fit_loop)
    loaders = combined.flattened if combined is not None else []
    return [x for x in loaders if isinstance(getattr(x, "num_workers", None), int)]


def _check_worker_count(trainer: Any) -> Iterator[FreezeWarning]:
    cores, ranks = len(os.sched_getaffinity(0)), _ranks_here(trainer)
    workers = sum(loader.num_workers for loader in _loaders_with_workers(trainer))
    if workers * ranks > WORKERS_PER_CORE * cores:
        yield FreezeWarning(
            f"{ranks} ranks with {workers} loader workers each are {workers * ranks} processes "
            f"for {cores} cores: they slow each other down, and starting them takes long.",
            f"Set num_workers to about {max(1, cores // ranks)}.",
        )


def _check_shared_memory(trainer: Any, batch: Any) -> Iterator[FreezeWarning]:
    loaders = [loader for loader in _loaders_with_workers(trainer) if loader.num_workers]
    if not loaders or not os.path.isdir(_SHARED_MEMORY):
        return
    file_system = os.statvfs(_SHARED_MEMORY)
    ahead = sum(x.num_workers * (x.prefetch_factor or 2) for x in loaders) / len(loaders)
    yield from shared_memory_warnings(
        batch_bytes=sum(t.nbytes for t in _tensors_of(batch)),
        batches_ahead=int(ahead),
        ranks=_ranks_here(trainer),
        size_bytes=file_system.f_frsize * file_system.f_blocks,
    )


def shared_memory_warnings(
    batch_bytes: int, batches_ahead: int, ranks: int, size_bytes: int
) -> Iterator[FreezeWarning]:
    """Warn if the batches that all ranks' workers hold ready do not fit into shared memory.

    ``batches_ahead`` is the number of batches that the workers of one rank hold ready, and
    ``size_bytes`` the size of the file system for shared memory.
    """
    needed = batch_bytes * batches_ahead * ranks
    if needed > size_bytes:
        yield FreezeWarning(
            f"Loader workers hold up to {needed >> 20} MiB of batches ready in {_SHARED_MEMORY}, "
            f"which has {size_bytes >> 20} MiB: a worker will be killed by a bus error.",
            "Make it larger (docker run --shm-size or --ipc=host), or lower num_workers or "
            "prefetch_factor.",
        )


def _tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors in ``batch``, searched as Lightning does, in at most ``_MAX_PARTS``."""
    tensors: list[torch.Tensor] = []
    parts = [batch]
    for _ in range(_MAX_PARTS):
        if not parts:
            break
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
    return tensors


def _check_batch_size(trainer: Any, batch: Any, stage: str) -> Iterator[FreezeWarning]:
    """Warn if Lightning guesses the batch size from tensors of different lengths.

    Lightning weights an epoch's mean with the length of the first tensor.
    """
    results = active_results(trainer)
    if results is None or results.batch_size is None:
        return
    sizes = sorted({t.shape[0] if t.ndim else 1 for t in _tensors_of(batch)})
    if len(sizes) > 1:
        names = _epoch_means(_logged_results(trainer))
        yield FreezeWarning(
            f"Lightning guesses the batch size in {stage}: the batch contains tensors of length "
            f"{', '.join(str(s) for s in sizes[:4])}, and the mean of {_list_names(names)} over an "
            f"epoch is weighted with {results.batch_size}.",
            "Pass the batch size: self.log(..., batch_size=...).",
        )


def _check_unsynchronised_logging(trainer: Any) -> Iterator[FreezeWarning]:
    names = _epoch_means(r for r in _logged_results(trainer) if not is_synchronised(r.meta))
    if names:
        yield FreezeWarning(
            f"{_list_names(names)} {'is' if len(names) == 1 else 'are'} logged in validation "
            "without sync_dist=True: each rank has a value of its own. Decisions that use it "
            "(early stopping, the best checkpoint, a learning rate schedule) may differ between "
            "ranks, which freezes the run.",
            "Log it with sync_dist=True, or log a torchmetrics metric object.",
        )


def _check_contradictory_logging(trainer: Any) -> Iterator[FreezeWarning]:
    for result in _logged_results(trainer):
        if is_synchronised(result.meta) and result.meta.sync.rank_zero_only:
            yield FreezeWarning(
                f"{result.meta.name} is logged with both sync_dist=True and rank_zero_only=True: "
                "it is not synchronised.",
                "Remove rank_zero_only=True: Lightning writes the value only once anyway.",
            )


def _logged_results(trainer: Any) -> list[Any]:
    results = active_results(trainer)
    return [] if results is None else list(results.values())


def _epoch_means(results: Iterable[Any]) -> list[str]:
    """Return the names of the tensors among ``results`` that are averaged over the epoch."""
    return sorted({r.meta.name for r in results if r.is_tensor and r.meta.on_epoch})


def _list_names(names: list[str]) -> str:
    """Return at most three names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
