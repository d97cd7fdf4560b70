"""A process that hangs in a chosen way; argument: how, and its rank. No torch."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path


def locked() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def gil() -> None:
    buffer = ctypes.create_string_buffer(1)
    ctypes.PyDLL(None).read(os.pipe()[0], buffer, 1)


def asleep() -> None:
    while True:
        time.sleep(1000)


def own_handler() -> None:
    signal.signal(57, lambda *_: Path(sys.argv[3]).write_text("sent"))
    asleep()


def another_runs() -> None:
    def deep(calls: int) -> int:
        return deep(calls - 1) + 1 if calls else 0

    def run() -> None:
        while True:
            sorted(range(50), key=lambda _: deep(30))

    threading.Thread(target=run, daemon=True).start()
    locked()


late = asleep
"""Its heartbeat thread runs and never answers."""


def never(*_: object) -> None:
    raise TimeoutError


def worker() -> None:
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"pt_data_worker", 0, 0, 0)
        in_the_worker()
    asleep()


def computes() -> None:
    """Run Python, after moving the output of faulthandler to the file of the third argument."""
    if len(sys.argv) > 3:
        other = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT)
        faulthandler.register(57, file=other, all_threads=False)
    while True:
        pass


def child_computes() -> None:
    if os.fork() == 0:
        computes()
    asleep()


def computes_in_c() -> None:
    """One call without Python that takes minutes and holds the GIL."""
    sum(itertools.repeat(1.0, 1 << 40))


def in_the_worker() -> None:
    asleep()


def fetches() -> None:
    """Wait for data, while a worker decodes."""
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"pt_data_worker", 0, 0, 0)
        decodes()
    asleep()


def decodes() -> None:
    while True:
        sum(range(1000))


def gil_at_first() -> None:
    """Hold the GIL until something is written to the FIFO of the third argument."""
    buffer = ctypes.create_string_buffer(1)
    ctypes.PyDLL(None).read(os.open(sys.argv[3], os.O_RDWR), buffer, 1)
    decodes()


def main() -> None:
    how, rank = sys.argv[1], int(sys.argv[2])
    if how not in ("asleep", "computes", "child_computes", "computes_in_c"):
        from ltui.training.rank import stack_sampler
        from ltui.training.rank.heartbeat_thread import HeartbeatThread, start_heartbeat_thread

        run_dir = Path(os.environ["LTUI_RUN_DIR"])
        (run_dir / "queue" / "1").mkdir(parents=True, exist_ok=True)
        vars(stack_sampler)["SAMPLE_S"] = 1.0
        if how == "late":
            HeartbeatThread._write_evidence = never  # type: ignore[method-assign, assignment]
        assert start_heartbeat_thread(run_dir, 1, rank) is not None
        time.sleep(0.1)
    print("ready", flush=True)
    globals()[how]()


if __name__ == "__main__":
    main()
