"""What this machine has for a run to train on, told without torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from ltui.training.config.device_selection import Machine
from ltui.training.config.node_environment import read_node_environment

DRIVER_TIMEOUT_S = 5.0
"""A driver that has not answered by then hangs, as it does after a GPU fell off the bus."""

_Answer = TypeVar("_Answer")


def detect_machine(environment: Mapping[str, str]) -> Machine:
    """GPUs that a run would see, usable cores, and which of several nodes this is."""
    count = call_with_timeout(DRIVER_TIMEOUT_S, gpu_count)
    gpus = visible_gpus(count, environment)
    return Machine(gpus=gpus, cores=usable_cores(), node=read_node_environment(environment))


def call_with_timeout(seconds: float, ask: Callable[[], _Answer]) -> _Answer | None:
    """What ``ask`` returns; None where it does not in time, and its thread is left behind."""
    answers: list[_Answer] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), name="driver", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def gpu_count() -> int | None:
    """GPUs of the NVIDIA driver; 0 without one, None where there is one that does not answer."""
    # Local: its start is only worth it where a run is checked.
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
    """GPUs that ``CUDA_VISIBLE_DEVICES`` leaves; CUDA stops at the first that is not there."""
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
