"""Hardware of this machine that a run can use, found without torch."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from ltui.training.config.device_selection import Machine
from ltui.training.config.node_environment import read_node_environment
from ltui.training.config.run_spec import RunSpec
from ltui.training.nodes.node_address import reachable_address
from ltui.training.problem import Problem
from ltui.training.state.freeze_checks import precheck
from ltui.widgets.sanitise import clean_line

DRIVER_TIMEOUT_S = 5.0
"""Seconds to wait for the GPU driver. A driver hangs, for example, after a GPU fell off the bus."""

_Answer = TypeVar("_Answer")


def detect_machine(environment: Mapping[str, str]) -> Machine:
    """Return the GPUs that a run would see, the usable cores, and the index of this node."""
    count = call_with_timeout(DRIVER_TIMEOUT_S, gpu_count)
    gpus = visible_gpus(count, environment)
    node = read_node_environment(environment)
    if node.launcher is None:
        node = replace(node, own_address=reachable_address())
    return Machine(gpus=gpus, cores=usable_cores(), node=node)


def call_with_timeout(seconds: float, function: Callable[[], _Answer]) -> _Answer | None:
    """Return the result of ``function``, or None if it takes longer than ``seconds``.

    The thread of a call that takes longer is left behind.
    """
    answers: list[_Answer] = []
    thread = threading.Thread(target=lambda: answers.append(function()), name="driver", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_count() -> int | None:
    """Return the number of GPUs of the NVIDIA driver: 0 without a driver, None if the driver
    does not answer."""
    # Local: loaded only when a run is checked.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return 0 if getattr(error, "value", None) in absent else None
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(count: int | None, environment: Mapping[str, str]) -> int | None:
    """Return the number of GPUs that ``CUDA_VISIBLE_DEVICES`` leaves. CUDA stops at the first
    missing one."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or count is None:
        return count
    visible = 0
    for name in chosen.split(","):
        name = name.strip()
        exists = name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)
        if not exists:
            break
        visible += 1
    return min(visible, count) if not chosen.startswith("MIG-") else visible


SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only its size is read


def freeze_warnings(spec: RunSpec) -> list[Problem]:
    """Return the warnings with their place in the configuration; none for a user's command."""
    if spec.config is None:
        return []
    warnings = precheck(
        spec.config,
        ranks=spec.nproc,
        cores=usable_cores(),
        shared_memory_bytes=_shared_memory_bytes(),
    )
    return [Problem(where=path, what=c.what, remedy=c.remedy) for path, c in warnings]


def _shared_memory_bytes() -> int | None:
    """Return the size of the file system through which loader workers pass batches, if any."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).total
    except OSError:
        return None


def print_warnings(warnings: list[Problem]) -> None:
    """Print the warnings on standard error, one per line."""
    for warning in warnings:
        sys.stderr.write(f"warning: {clean_line(str(warning), 1000)}\n")
