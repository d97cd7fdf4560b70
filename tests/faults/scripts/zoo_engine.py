"""Imports torch and Lightning once and forks the ranks: a launcher for many short runs.

    ZOO_FAULT=sigkill ZOO_FOLDER=/tmp/x python zoo_engine.py 3

Each rank gets torchrun's variables and runs ``train_zoo.train``. As under Lightning's own launcher,
five seconds after a rank failed the others are killed and the engine exits 1. The ranks die with
the engine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time

import hollow

hollow.hide()

import train_zoo  # noqa: E402  (torch and Lightning, once for all ranks)

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _be_rank(rank: int, world: int, port: int, engine_pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != engine_pid:
        os._exit(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="zoo",
    )  # fmt: skip
    train_zoo.train()


def _wait(ranks: dict[int, int]) -> int:
    """Until no rank is left; 1 where one failed."""
    code, failed_at = 0, None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            del ranks[pid]
            if status != 0 and failed_at is None:
                code, failed_at = 1, time.monotonic()
        elif pid == 0:
            time.sleep(0.05)
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            for left in ranks:
                os.kill(left, signal.SIGKILL)
    return code


def main(world: int) -> int:
    port, engine_pid = _free_port(), os.getpid()
    ranks: dict[int, int] = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, world, port, engine_pid)
            return 0
        ranks[pid] = rank
    return _wait(ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
