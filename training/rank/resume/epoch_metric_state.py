"""What Lightning has gathered since the epoch began, which its checkpoints leave out.

Means that a module logs with ``on_epoch`` (and maxima, sums), torchmetrics' own states, and the
last values that callbacks and schedulers look at. All are the rank's own until the epoch ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ltui.training.rank.resume.stateful_loader import is_plain_data

Gathered = dict[str, Any]
_LAST = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_HOW = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx"),
    *("dataloader_idx", "metric_attribute"),
)
_MOST_BYTES = 64 << 20
"""Metrics that keep every prediction may grow without bound; beyond this they are left out."""


def logged(trainer: Any) -> Gathered:
    """What ``training_step`` and its hooks logged, and the last values of everything."""
    results, module = trainer.fit_loop.epoch_loop._results, trainer.lightning_module
    names = {id(metric): name for name, metric in _metrics(module)}
    means = {}
    for key, result in results.items():
        if not result.meta.on_epoch or result.has_reset:
            continue
        mean: dict[str, Any] = {"how": _how(result.meta)}
        if result.is_tensor:
            size = getattr(result, "cumulated_batch_size", None)
            mean.update(value=_kept(result.value), size=_kept(size))
        elif (name := names.get(id(result.value))) is not None:
            mean["metric"] = name
        means[key] = mean
    connector = trainer._logger_connector
    last = {name: _kept(dict(getattr(connector, name, {}))) for name in _LAST}
    return {"means": means, "last": {name: v for name, v in last.items() if is_plain_data(v)}}


def _how(meta: Any) -> dict[str, Any]:
    how = {name: getattr(meta, name) for name in _HOW}
    how["reduce_fx"] = meta.reduce_fx.__name__
    how["sync"] = [bool(meta.sync.should), bool(meta.sync.rank_zero_only)]
    return how


def metric_states(module: Any) -> Gathered:
    """Of every torchmetrics ``Metric`` in ``module`` that has been updated."""
    states, size = {}, 0
    for name, metric in _metrics(module):
        if not metric._update_count:
            continue
        state = {key: _kept(getattr(metric, key)) for key in metric._defaults}
        size += _bytes_of(state)
        if is_plain_data(state) and size <= _MOST_BYTES:
            states[name] = {"count": metric._update_count, "state": state}
    return states


def restore_metrics(module: Any, states: Gathered) -> None:
    device = getattr(module, "device", torch.device("cpu"))
    for name, metric in _metrics(module):
        if (saved := states.get(name)) is None or set(saved["state"]) != set(metric._defaults):
            continue
        for key, value in saved["state"].items():
            setattr(metric, key, _on(value, device))
        metric._update_count = saved["count"]
        metric._computed = None


def restore_logged(trainer: Any, gathered: Gathered, *, over: bool) -> Callable[[], None]:
    """Where the epoch goes on: what was gathered under a name joins as it is logged next. Where no
    batch is left of it (``over``), the results are made at once. Returns what is to be called as
    the next epoch begins."""
    device = trainer.strategy.root_device
    connector = trainer._logger_connector
    for name, values in gathered["last"].items():
        getattr(connector, name).update(_on(values, device))
    results = trainer.fit_loop.epoch_loop._results
    plain, made = type(results), []
    if over:
        for key, mean in gathered["means"].items():
            if (result := _result(trainer, results, mean)) is not None:
                results[key] = result
                made.append(key)
    elif gathered["means"]:
        _join(results, dict(gathered["means"]), device)

    def forget() -> None:
        results.__class__ = plain
        # Lightning compares how a name is logged with how it was, down to functions.
        for key in made:
            results.pop(key, None)

    return forget


def _result(trainer: Any, results: Any, mean: dict[str, Any]) -> Any:
    """Lightning's record of one name."""
    device, how = trainer.strategy.root_device, mean["how"]
    theirs = sys.modules[type(results).__module__]
    meta = theirs._Metadata(reduce_fx=how["reduce_fx"], **{name: how[name] for name in _HOW})
    should, rank_zero_only = how["sync"]
    meta.sync = theirs._Sync(
        fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only
    )
    result = theirs._ResultMetric(meta, "value" in mean)
    if "value" in mean:
        result.value = _on(mean["value"], device)
        if mean["size"] is not None:
            result.cumulated_batch_size = _on(mean["size"], device)
    else:
        metrics = dict(_metrics(trainer.lightning_module))
        if (metric := metrics.get(mean.get("metric", ""))) is None:
            return None
        result.value = metric
    result._update_count = 1
    return result


def _join(results: Any, means: dict[str, Any], device: torch.device) -> None:
    plain = type(results)

    class Joined(plain):  # type: ignore[misc, valid-type]
        """Lightning's results, of which each takes up what it had gathered as it is made."""

        def __setitem__(self, key: str, result: Any) -> None:
            super().__setitem__(key, result)
            saved = means.pop(key, None)
            if saved is not None and result.is_tensor and "value" in saved:
                result.value = _on(saved["value"], device)
                if saved["size"] is not None:
                    result.cumulated_batch_size = _on(saved["size"], device)
            if not means:
                self.__class__ = plain

    results.__class__ = Joined


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or module is None:
        return
    for name, part in module.named_modules():
        if isinstance(part, torchmetrics.Metric):
            yield name, part


def _kept(value: Any) -> Any:
    """A copy that later updates leave alone."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [item.detach() if isinstance(item, torch.Tensor) else item for item in value]
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    return value


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_on(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _on(item, device) for key, item in value.items()}
    return value


def _bytes_of(state: dict[str, Any]) -> int:
    size = 0
    for value in state.values():
        for item in value if isinstance(value, list) else [value]:
            size += item.numel() * item.element_size() if isinstance(item, torch.Tensor) else 8
    return size
