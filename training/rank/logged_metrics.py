"""Send the values that the user's module and callbacks log, row by row as a logger gets them.

A row is taken where Lightning makes it: after a batch in which the optimizer stepped, after a batch
or the end of an evaluation, and at the end of an epoch. So ltui has the rows of a logger with
``log_every_n_steps=1``. Nothing is computed here, because computing an epoch's metric may be a
collective.

Values that reach no logger (``logger=False``, or a callback that sets ``callback_metrics``) are
read from where Lightning keeps values for callbacks. It replaces a value by one in other memory, so
that tells a new value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ltui.training.rank import lightning_internals
from ltui.training.rank.channel import Channel
from ltui.training.rank.metric_records import MetricSender

Row = Mapping[str, Any]
"""Names and values, which are tensors of one element or numbers."""


class LoggedMetrics:
    """Sends the logged values of one Trainer."""

    __slots__ = ("_batch_row", "_connector", "_row", "_sent", "flush", "send")

    def __init__(self, channel: Channel) -> None:
        sender = MetricSender(channel)
        self.send, self.flush = sender.send, sender.flush
        self._connector: Any = None
        self._row: Row = {}
        """What Lightning last read from the results of the training."""
        self._batch_row: Row = {}
        """The row of the last batch of the training that was sent."""
        self._sent: dict[str, Any] = {}
        """Values for callbacks that were sent."""

    def ignore_present(self, trainer: Any) -> None:
        """Treat every present value as sent: a resume has restored it from a checkpoint."""
        self._sent = dict(lightning_internals.callback_metrics(trainer))

    def watch(
        self,
        trainer: Any,
        steps_completed: Callable[[], int],
        active_finder: Callable[[], object],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Send every row from now on, except those of batches of the training.

        ``active_finder`` returns a true value while a trial of Lightning's Tuner runs, whose values
        do not belong to the run. ``failed`` is called with an error.
        """
        connector = self._connector = lightning_internals.logger_connector(trainer)
        results, log = lightning_internals.training_results(trainer), connector.log_metrics
        read = results.metrics

        def metrics(on_step: bool) -> Any:
            values = read(on_step)
            self._row = values["log"]
            return values

        @functools.wraps(log)
        def log_metrics(row: Row, *args: Any, **kwargs: Any) -> None:
            try:
                send_row(row)
            except Exception as error:  # noqa: BLE001
                failed(error)
            log(row, *args, **kwargs)

        def send_row(row: Row) -> None:
            in_batch = lightning_internals.is_within_batch(connector)
            if (in_batch and (row is self._row or not row)) or active_finder():
                return  # the row of a batch of the training was sent when the batch ended
            step = steps_completed() + lightning_internals.is_accumulating(trainer)
            if in_batch:  # of an evaluation
                self.send(row, step, trainer.current_epoch)
            else:
                self._send_row(row, step, trainer.current_epoch)
                self.flush()

        results.metrics, connector.log_metrics = metrics, log_metrics

    def send_batch(self, step: int, epoch: int) -> None:
        """Send the row of the batch of the training that has just ended."""
        row = self._batch_row = self._row
        table = lightning_internals.callback_table(self._connector)
        # The table has every name of the row.
        if len(table) != len(row):
            row = self._with_others(row, table)
        if row:
            self.send(row, step, epoch)

    def _send_row(self, row: Row, step: int, epoch: int) -> None:
        table = lightning_internals.callback_table(self._connector)
        all_values = self._with_others(row, table)
        self._sent.update(table)
        if all_values:
            self.send(all_values, step, epoch)

    def _with_others(self, row: Row, table: Row) -> Row:
        """Return ``row`` with the values for callbacks that it lacks and that are new."""
        sent, new = self._sent, {}
        for name, value in table.items():
            if name not in row and (old := sent.get(name)) is not value:
                sent[name] = value
                if old is None or _memory(old) != _memory(value):
                    new[name] = value
        if not new:
            return row
        # The same value under another name (``loss`` for ``loss_step``), or of a batch of the
        # training, which was sent or only accumulated gradients.
        rows = (row, self._row, self._batch_row)
        in_rows = {_memory(value) for values in rows for value in values.values()}
        new = {name: value for name, value in new.items() if _memory(value) not in in_rows}
        return {**row, **new}


def _memory(value: Any) -> int:
    """Return what identifies a value: Lightning makes new tensors of the same memory."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else id(value)
