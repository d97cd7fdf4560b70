"""Which rank this process is, and forking the ranks of a launch from one that has imported torch.

Importing Lightning takes ten seconds of CPU here, so all launches of a suite come from one process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path


@dataclass
class World:
    rank: int = 0
    ranks: int = 1
    nodes: int = 1
    samples: int | None = None
    """Samples of the data set, if any number of ranks does not get the same number of batches."""

    @property
    def node(self) -> int:
        return self.rank // (self.ranks // self.nodes)


HERE = World()
GIVE_UP = timedelta(seconds=400)
"""How long ranks wait for each other."""


def start(
    ranks: int, do: Callable[[], object], log: Path | None = None, *, nodes: int = 1
) -> list[int]:
    """Fork ``ranks`` processes that run ``do`` as the ranks of one launch; their process ids.

    ``nodes`` is the number of machines that the ranks believe they run on.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            HERE.rank, HERE.ranks, HERE.nodes = rank, ranks, nodes
            _be(port, do, log)
        pids.append(pid)
    return pids


def wait(pids: list[int]) -> list[int]:
    """Exit codes, negative for a signal. Where one fails the others are ended."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        if pid not in pids:
            continue
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            for other in set(pids) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def _be(port: int, do: Callable[[], object], log: Path | None) -> None:
    code = 1
    rank, on_node = HERE.rank, HERE.ranks // HERE.nodes
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank % on_node),
            WORLD_SIZE=str(HERE.ranks),
            LOCAL_WORLD_SIZE=str(on_node),
            GROUP_RANK=str(HERE.node),
            GROUP_WORLD_SIZE=str(HERE.nodes),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="forked",
        )
        if log is not None:
            out = os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
        do()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
