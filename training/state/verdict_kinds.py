"""Registry of verdict kinds: the problems that the judge can report.

The members compare equal to the plain strings that runs store and send, so a kind that was read
from a file is used without conversion. Kinds of a later version stay plain strings. Pure.
"""

from __future__ import annotations

from enum import Enum


class VerdictKind(str, Enum):
    """Kinds of problems of a run. The values are stored and must not change.

    Each group names the level that its kinds usually have; a verdict's level may rise with time.
    """

    # Dead: a rank has ended.
    KILLED = "killed"
    """A signal ended the rank."""
    OUT_OF_MEMORY = "out_of_memory"
    RAISED = "raised"
    """The rank raised an exception."""
    EXITED = "exited"
    """The rank exited, with or without an exit code that is known."""
    WORKER_DIED = "worker_died"
    """A DataLoader worker ended."""
    NODE_GONE = "node_gone"
    """A machine was unreachable for longer than the limit, so its ranks count as lost."""

    # Stalled: the run makes no progress.
    STOPPED = "stopped"
    """The rank is stopped by SIGSTOP or a debugger."""
    WORKER_STOPPED = "worker_stopped"
    """A DataLoader worker is stopped by SIGSTOP or a debugger."""
    DISK = "disk"
    """The rank waits in uninterruptible disk I/O."""
    GIL_HELD = "gil_held"
    FROZEN = "frozen"
    """The rank does not move and uses no processor time."""
    BUSY = "busy"
    """The rank uses processor time without progress."""
    WAITS_FOR_GPU = "waits_for_gpu"
    """The GPU does not finish its kernels, or its driver does not answer."""
    WORKER_FROZEN = "worker_frozen"
    WORKER_BUSY = "worker_busy"
    MISMATCH = "mismatch"
    """Ranks called different collectives, or the same one with different arguments."""
    UNEVEN = "uneven"
    """Ranks have different numbers of batches."""
    LEFT_EARLY = "left_early"
    """A rank left its epoch before the planned number of batches."""
    FINISHED_EARLY = "finished_early"
    """A rank finished training while others still train."""
    UNUSED_PARAMETERS = "unused_parameters"
    """DDP waits for gradients of parameters that were not used."""
    SIGTERM = "sigterm"
    """The rank received SIGTERM and hangs in Lightning's handler, which calls a collective."""
    RENDEZVOUS = "rendezvous"
    """Ranks have not joined the process group."""
    TRANSPORT = "transport"
    """All ranks wait in the same collective."""
    UNKNOWN = "unknown"
    """The evidence does not show a cause."""

    # Slow: the run makes progress.
    STRAGGLER = "straggler"
    """One rank is slower than the others."""
    SLOW_RANK = "slow_rank"
    """One rank advances while the others wait for it."""
    SLOW_DATA = "slow_data"
    """All ranks wait for their data loaders."""
    SLOW_STEP = "slow_step"
    """All ranks compute, or the machine is overloaded."""
    COMPILING = "compiling"
    """A rank compiles code (torch.compile, Triton, Numba) while the others wait."""
    CHECKPOINT = "checkpoint"
    """A rank writes a checkpoint while the others wait."""
    SLOW_NODE = "slow_node"
    """All ranks of one machine are slower than those of the others."""

    # Warning: the run is not affected yet.
    NOT_EXITING = "not_exiting"
    """A rank finished training and its process does not exit."""
    DRIFT = "drift"
    """Ranks are at different epochs or batches at the same step."""
    DIVERGING = "diverging"
    """A rank called a collective that the others did not, so later collectives will not match."""
    MEMORY = "memory"
    """The machine or container is almost out of memory."""
    SHARED_MEMORY = "shared_memory"
    """``/dev/shm`` is almost full, or a worker died because it was."""
    NAN_LOSS = "nan_loss"
    """The loss is not finite."""
    NODE_UNREACHABLE = "node_unreachable"
    """A machine does not answer: its link is cut, or it is down."""
    AGENT_KILLED = "agent_killed"
    """A machine answers and no agent runs there."""
    AGENT_FROZEN = "agent_frozen"
    """A machine answers but its agent does not run."""
    CLOCK_JUMP = "clock_jump"
    """The wall clock of a machine was set to another time."""

    __str__ = str.__str__


GPU_KIND_PREFIX = "gpu_"
"""Kinds that begin with this are findings about a GPU (``training/gpu/findings.py``)."""


def is_gpu_kind(kind: str) -> bool:
    """Return True if a verdict of this kind is about a GPU and not about a rank."""
    return kind.startswith(GPU_KIND_PREFIX)
