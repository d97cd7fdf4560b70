"""Starts two ranks of a program by a fork: ``forked_ranks.py PROGRAM ARGUMENTS``."""

from __future__ import annotations

import os
import runpy
import sys

from torch.multiprocessing.spawn import start_processes


def run_rank(rank: int) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    start_processes(run_rank, nprocs=2, start_method="fork")
