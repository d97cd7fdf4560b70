"""The faults themselves. Each is injected once, in one rank, at one step, with its time.

``ZOO_FAULT`` names the fault, several joined by ``+``. The time of the injection is written to
``ZOO_FOLDER`` (``injected``: CLOCK_MONOTONIC seconds). With ``ZOO_ONCE``, processes that start
after it have no fault. The catalogue finds the expected place
by line comments ``fault: NAME``.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEP = int(os.environ.get("ZOO_STEP", "8"))
"""Faults strike in the batch with this index."""
FOLDER = Path(os.environ.get("ZOO_FOLDER", "."))
_OVER = "ZOO_ONCE" in os.environ and (FOLDER / "injected").exists()
FAULTS = frozenset(() if _OVER else os.environ.get("ZOO_FAULT", "none").split("+"))
_FOREVER_S = 3600.0


def rank_here() -> int:
    return int(os.environ.get("RANK", "0"))


def mark() -> None:
    """Write the time of the first injection in any process of the run."""
    try:
        handle = os.open(FOLDER / "injected", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    os.write(handle, f"{time.monotonic()}\n".encode())
    os.close(handle)


def wants(name: str, rank: int = 1) -> bool:
    """Return True if the run has the fault ``name`` and this rank gets it."""
    return name in FAULTS and rank_here() == rank


# In the dataset, of the rank itself or of its worker.


def stuck_sample(batch: int) -> None:
    """Called for the first sample of every batch."""
    for name, rank in (("data_sleep", 1), ("worker_sleep", 1), ("val_sleep", 1)):
        if wants(name, rank):
            mark()
            time.sleep(_FOREVER_S)  # fault: data_sleep
    if "all_frozen" in FAULTS:
        mark()
        time.sleep(_FOREVER_S)  # fault: all_frozen
    if wants("data_socket"):
        ours, _theirs = socket.socketpair()
        mark()
        ours.recv(1)  # fault: data_socket
    if wants("data_gil"):
        buffer = ctypes.create_string_buffer(1)
        mark()
        # Unlike a sleep, a read continues after a signal handler.
        ctypes.PyDLL(None).read(os.pipe()[0], buffer, 1)  # fault: data_gil
    if wants("data_spin") or wants("worker_spin"):
        mark()
        # fmt: off
        while math.sqrt(2.0): pass  # noqa: E701  # fault: data_spin
        # fmt: on
    if wants("data_lock") or wants("worker_lock"):
        lock = threading.Lock()
        lock.acquire()
        mark()
        lock.acquire()  # fault: data_lock
    if wants("worker_stop") or wants("worker_stop2", 2):
        mark()
        os.kill(os.getpid(), signal.SIGSTOP)
    if wants("worker_kill"):
        mark()
        os.kill(os.getpid(), signal.SIGKILL)
    if wants("worker_oom"):
        _run_out_of_memory()
    if wants("shm_full"):
        _fill_shared_memory()


def _run_out_of_memory() -> None:
    """In a control group of its own, made by the runner."""
    Path(os.environ["ZOO_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    mark()
    held = []
    while True:
        held.append(b"\1" * (8 << 20))


def _fill_shared_memory() -> None:
    mark()
    with open("/dev/shm/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            return


# In training_step.


def _sleep_in_forward() -> None:
    time.sleep(_FOREVER_S)  # fault: forward_sleep


def _poll_for_a_file() -> None:
    while not (FOLDER / "never").exists():
        time.sleep(0.1)  # fault: polls_file


def _wait_for_a_program() -> None:
    subprocess.run(["sleep", str(_FOREVER_S)], check=True)  # fault: child_program


def _receive_what_nobody_sends() -> None:
    dist.recv(torch.ones(4), src=0)  # fault: p2p_recv


def _compute_for_ever() -> None:
    matrix = torch.ones(256, 256)
    while True:
        matrix = (matrix @ matrix).clamp(max=1.0)  # fault: one_compute


def _compile_by_torch() -> None:
    """Some twenty seconds of torch.compile, of which nothing is cached."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(FOLDER / "compiled")
    block = [torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.LayerNorm(32)]
    layers = torch.nn.Sequential(*block * 2)
    torch.compile(layers)(torch.ones(8, 32)).sum().backward()


def _compile_by_numba() -> None:
    """Some ten seconds of Numba, which holds the GIL for much of them."""
    import numba  # only this fault needs it
    import numpy as np

    loops = (f" for i{n} in range(a.shape[0]):\n  s += a[i{n}] * {n}.5\n" for n in range(300))
    made: dict[str, Any] = {}
    exec("def summed(a):\n s = 0.0\n" + "".join(loops) + " return s\n", made)
    numba.njit(made["summed"])(np.ones(10))


def _raise() -> None:
    raise ValueError("the zoo's own mistake")  # fault: exc_one_rank


def _save_on_rank_0() -> None:
    dist.barrier()  # fault: call_sites


def _finalize() -> None:
    dist.barrier()


def _leak() -> None:
    """Until the control group of the whole run is almost full, then hold it.

    Cache of files does not count: the kernel takes it back when memory is wanted.
    """
    group = Path(os.environ["ZOO_CGROUP"])
    limit = int((group / "memory.limit_in_bytes").read_text())
    held = []
    mark()
    while _held_bytes(group) < 0.96 * limit:
        held.append(b"\1" * (8 << 20))
        time.sleep(0.02)
    globals()["_HELD"] = held


def _held_bytes(group: Path) -> int:
    """Memory of the group's processes without their cache of files."""
    facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    cached = int(facts["total_inactive_file"]) + int(facts["total_active_file"])
    return int((group / "memory.usage_in_bytes").read_text()) - cached


STEP_FAULTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "forward_sleep": (1, _sleep_in_forward),
    "one_compute": (1, _compute_for_ever),
    "exc_one_rank": (1, _raise),
    "sigstop": (1, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "sigstop3": (3, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "sigkill": (1, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "sigkill0": (0, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "term_forward": (1, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "exit_early": (1, lambda: os._exit(3)),
    "exit_clean": (1, lambda: os._exit(0)),
    "segv": (1, lambda: ctypes.string_at(0)),
    "memory_low": (1, _leak),
    "sys_exit": (1, lambda: sys.exit(4)),
    "polls_file": (1, _poll_for_a_file),
    "child_program": (1, _wait_for_a_program),
    "p2p_recv": (1, _receive_what_nobody_sends),
}
"""name -> (rank, what it does there in the batch ``STEP``)."""


def in_step(module: Any, batch_idx: int) -> None:
    """Called at the beginning of every training batch."""
    if wants("warms_up") and batch_idx == 0:
        until = time.monotonic() + 20.0
        while time.monotonic() < until:
            math.sqrt(2.0)
    if batch_idx < STEP:
        return
    if batch_idx == STEP:
        _once(module)
    if wants("compiles") and batch_idx in (STEP, STEP + 2):
        (_compile_by_torch if batch_idx == STEP else _compile_by_numba)()
    if wants("compute_slow") or ("node_slow" in FAULTS and os.environ.get("GROUP_RANK") == "1"):
        mark()
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            torch.ones(256, 256) @ torch.ones(256, 256)  # fault: compute_slow
    if "all_compute" in FAULTS and batch_idx == STEP:
        mark()
        until = time.monotonic() + 25.0
        while time.monotonic() < until:
            torch.ones(256, 256) @ torch.ones(256, 256)


def _once(module: Any) -> None:
    for name, (rank, strike) in STEP_FAULTS.items():
        if wants(name, rank):
            if name not in ("oom_rank", "memory_low"):
                mark()
            strike()
    if wants("oom_rank"):
        _run_out_of_memory()
    if wants("stop_one"):
        mark()
        module.trainer.should_stop = True
    if wants("netdown"):
        mark()
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    if wants("contended"):
        mark()
        _crowd_a_core()
    _collectives()


def _collectives() -> None:
    """Collectives that do not match."""
    tensor = torch.ones(4)
    if wants("rank0_barrier", 0):
        mark()
        dist.barrier()  # fault: rank0_barrier
    if "mismatch_op" in FAULTS:
        mark()
        if rank_here() == 1:
            dist.broadcast(tensor, 0)  # fault: mismatch_op
        else:
            dist.all_reduce(tensor)
    if "mismatch_shape" in FAULTS:
        mark()
        size = 6 if rank_here() == 1 else 4
        dist.all_reduce(torch.ones(size))  # fault: mismatch_shape
    if "group_order" in FAULTS:
        groups: list[Any] = [dist.new_group(), dist.new_group()]
        mark()
        for group in groups if rank_here() != 1 else reversed(groups):
            dist.all_reduce(tensor, group=group)  # fault: group_order
    if "call_sites" in FAULTS:
        mark()
        if rank_here() == 0:
            _save_on_rank_0()
        _finalize()


def _crowd_a_core() -> None:
    """Three busy processes on the one core that this rank may use from now on. Where they may go
    before it, what else the machine does to the other ranks' cores matters less."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    parent = os.getpid()
    for _ in range(3):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with contextlib.suppress(PermissionError):
                os.nice(-5)
            while os.getppid() == parent:
                for _ in range(10000):
                    math.sqrt(2.0)
            os._exit(0)


# In other places.


def in_setup() -> None:
    """Called in ``setup``, before the ranks have trained."""
    if wants("setup_sleep"):
        mark()
        time.sleep(_FOREVER_S)  # fault: setup_sleep


def in_prepare_data() -> None:
    """Called on rank 0 alone, for which the others wait: a download."""
    if "prepares" in FAULTS and rank_here() == 0:
        write_for(40.0)


def after_batch(batch_idx: int) -> None:
    """Called when a batch has ended, where loggers send what they have."""
    if batch_idx == STEP and wants("logger_sleep", 0):
        mark()
        time.sleep(_FOREVER_S)  # fault: logger_sleep


def after_validation() -> None:
    if wants("val_end_sleep"):
        mark()
        time.sleep(_FOREVER_S)  # fault: val_end_sleep


def after_epoch() -> None:
    """Called at an epoch's end: rank 0 has a program upload something, for which it waits."""
    if "uploads" in FAULTS and rank_here() == 0:
        work = "import time\nuntil = time.time() + 15\nwhile time.time() < until: sum(range(9999))"
        subprocess.run([sys.executable, "-c", work], check=True)


def after_training() -> None:
    """Called when ``fit`` has returned."""
    if wants("exit_stuck"):
        mark()
        time.sleep(_FOREVER_S)  # fault: exit_stuck
    if wants("exits_late"):
        time.sleep(8.0)


# While saving a checkpoint, on rank 0 or on that of ZOO_SAVING_RANK.


def in_checkpoint(saves: int) -> None:
    """Called at every save; the third one strikes, so that two quick ones came before."""
    if saves != 2 or rank_here() != int(os.environ.get("ZOO_SAVING_RANK", "0")):
        return
    if "ckpt_slow" in FAULTS:
        mark()
        time.sleep(_FOREVER_S)  # fault: ckpt_slow
    if "ckpt_bigwrite" in FAULTS:
        mark()
        write_for(60.0)
    if "frozen_disk" in FAULTS:
        mount = os.environ["ZOO_MOUNT"]
        with open(f"{mount}/big.ckpt", "wb", buffering=0) as file:
            file.write(b"\0" * 65536)
            subprocess.run(["fsfreeze", "-f", mount], check=True)
            mark()
            file.write(b"\0" * 65536)  # fault: frozen_disk


def write_for(seconds: float) -> None:
    until = time.monotonic() + seconds
    with open(FOLDER / "big.ckpt", "wb", buffering=0) as file:
        while time.monotonic() < until:
            file.seek(0)
            file.write(b"\0" * (4 << 20))
            os.fsync(file.fileno())
            time.sleep(0.2)  # fault: ckpt_bigwrite
