"""Runs programs in forks of one process that has imported torch, which takes seconds each time.

Each line of its input has the arguments of ``run`` for one program. Prints the program's exit code.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from typing import Any

import torch
import torch._dynamo  # ltui imports it in every program whose steps it counts


def next_request() -> dict[str, Any]:
    """Fork for each request, which the child returns."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def run(words: list[str], folder: str, environment: dict[str, str], output: str) -> None:
    """Run a file and its arguments as Python does; torch loads its extensions before."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = words
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    for path, number in ((os.devnull, 0), (output, 1)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        torch._import_device_backends()
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    gc.freeze()  # else the collector of each program goes through all of torch
    run(**next_request())
