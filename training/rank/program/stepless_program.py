"""The values of a program whose steps ltui does not see, because it has no optimizer of torch.

Such a process is no rank: it has no pulse, and nobody waits for it. It only sends what it logs,
through the queue of its rank, and only if there is none yet. A process that makes a step later
replaces that file by its own.
"""

from __future__ import annotations

import os
import sys

import torch

from ltui.training.rank.channel import Channel, current_channel
from ltui.training.rank.metric_records import MetricSender
from ltui.training.rank.program import printed_values
from ltui.training.rank.program.logged_values import Send, Values, logged_values, send_through
from ltui.training.rank.program.optimizer_hook import KERAS
from ltui.training.rank.program.rank_claim import read_place
from ltui.training.shared.rank_environment import RankEnvironment, rank_from_environment

_channel: Channel | None = None


def open_stepless() -> Send | None:
    """Return a function that sends values, unless a rank has a queue, which is left alone."""
    channel = _open()
    if channel is None:
        return None

    sender = MetricSender(channel)
    send_unflushed = send_through(channel, sender)

    def send(values: Values, step: int, t: float) -> None:
        send_unflushed(values, step, t)
        sender.flush()
        logged_values.report_dropped(channel)
        printed_values.report_skipped(channel)

    return send


def send_at_exit() -> None:
    """Send what waits, what was dropped, and why a pattern found nothing.

    Not if this process is a rank, which does that itself.
    """
    if current_channel() is not None:
        return
    logged_values.begin_stepless()
    logged_values.send_waiting()
    text = printed_values.complaint() if printed_values.has_printed() else None
    if (text or logged_values.dropped) and (channel := _open()) is not None:
        logged_values.report_dropped(channel, at_end=True)
        printed_values.report_skipped(channel)
        if text is not None:
            channel.event_from_rank_0("warning", text, remedy="Try it on a line of the log.")


def _open() -> Channel | None:
    """Return the channel of this process, which is opened once; None if it must not have one."""
    global _channel
    environment = RankEnvironment.read(os.environ)
    if environment is None or torch.utils.data.get_worker_info() is not None:
        return None
    if current_channel() is not None:
        return None
    if _channel is not None and _channel.pid == os.getpid():
        return _channel
    rank, world_size = read_place()
    own = environment.queue_dir / f"rank-{rank:05d}.queue"
    others = environment.queue_dir.glob("rank-*.queue")
    # Without a launcher that names it, this process may have started the ranks that have queues.
    if own.exists() or (rank_from_environment(os.environ) is None and any(others)):
        return None
    channel = _channel = Channel(environment, rank, has_pulse=False)
    uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.device("cuda" if uses_gpu else "cpu")
    kind = "Keras" if KERAS in sys.modules else "PyTorch without torch.optim"
    channel.send_hello(device, rank, world_size, program=kind, saves=False)
    return channel
