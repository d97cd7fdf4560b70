"""Which devices a run gets: how many ranks, on what. What exists is an argument."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ltui.training.config.node_environment import NodeEnvironment
from ltui.training.config.yaml_document import Fault, parse_value

RANKS_PER_CORE = 4
"""More CPU ranks than this for each core is taken for a mistake."""
_GPU = ("gpu", "cuda")
_FREE = re.compile(r"free(?::0*([1-9]\d*))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this machine has; None where nobody looked, and then nothing is refused."""

    gpus: int | None = None
    cores: int | None = None
    node: NodeEnvironment | None = None
    """Which of several nodes it is."""


UNKNOWN_MACHINE = Machine()


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """Decided: ``accelerator`` and ``devices`` as Trainer takes them, ``nproc`` ranks."""

    accelerator: str
    devices: int | list[int]
    nproc: int
    gpus: str | None = None
    """``free:2`` where the run waits for free GPUs and gets those."""


def choose_devices(
    trainer: Mapping[str, Any], machine: Machine, cpu_ranks: int
) -> tuple[Devices, list[Fault]]:
    """What ``trainer.accelerator`` and ``trainer.devices`` come to here, and what can't be.

    Where ``devices`` is ``auto``: every GPU, else ``cpu_ranks`` ranks on the CPU. An accelerator
    that isn't CPU or GPU is left to Lightning.
    """
    asked = trainer.get("accelerator", "auto")
    free = free_count(trainer.get("devices", "auto"))
    if free is not None:
        return _on_free(free, str(asked), machine)
    wanted = _wanted(trainer.get("devices", "auto"))
    if asked == "cpu" or (asked == "auto" and not machine.gpus):
        return _on_cpu(wanted, machine, cpu_ranks, asked)
    if asked == "auto" or asked in _GPU:
        return _on_gpu(wanted, machine)
    count = len(wanted) if isinstance(wanted, list) else wanted or 1
    return Devices(accelerator=str(asked), devices=wanted or 1, nproc=count), []


def free_count(devices: Any) -> int | None:
    """How many free GPUs ``free:2`` asks for; None for anything else."""
    match = _FREE.fullmatch(devices.strip()) if isinstance(devices, str) else None
    return max(1, int(match[1] or 1)) if match else None


def _on_free(count: int, asked: str, machine: Machine) -> tuple[Devices, list[Fault]]:
    chosen = Devices(accelerator="gpu", devices=count, nproc=count, gpus=f"free:{count}")
    if asked not in ("auto", *_GPU):
        what = f"free:{count} requests GPUs, but trainer.accelerator is {asked}."
        remedy = f"Set trainer.devices={count}, or trainer.accelerator=gpu."
        return chosen, [Fault(path="trainer.devices", what=what, remedy=remedy)]
    faults = _on_gpu(count, machine)[1]
    return chosen, faults


def _wanted(devices: Any) -> int | list[int] | None:
    """None for ``auto``; a form that is wrong otherwise is for the type check to report."""
    if isinstance(devices, str):
        text = devices.strip()
        if "," in text:
            return [int(p) for p in text.split(",") if p.strip().isdecimal()]
        try:
            devices = parse_value(text)
        except ValueError:
            return None
    if isinstance(devices, list):
        return [d for d in devices if isinstance(d, int)]
    if isinstance(devices, int) and not isinstance(devices, bool) and devices > 0:
        return devices
    return None


def _on_cpu(
    wanted: int | list[int] | None, machine: Machine, cpu_ranks: int, asked: str
) -> tuple[Devices, list[Fault]]:
    faults: list[Fault] = []
    if isinstance(wanted, list):
        if asked == "auto":
            what = "GPUs are listed, but this machine has none."
        else:
            what = "CPU ranks are given as a number, not as a list."
        remedy = f"Set trainer.devices={max(1, len(wanted))}."
        faults.append(Fault(path="trainer.devices", what=what, remedy=remedy))
        wanted = max(1, len(wanted))
    count = wanted or max(1, cpu_ranks)
    most = RANKS_PER_CORE * machine.cores if machine.cores else None
    if most is not None and count > most:
        what = f"{count} ranks are too many for {machine.cores} CPU cores."
        remedy = f"Use at most {most}."
        if asked == "auto" and machine.gpus == 0:
            has = f"no GPU and {machine.cores} CPU cores"
            what = f"{count} devices requested, but this machine has {has}."
            remedy = f"Use at most {most} ranks on the CPU."
        faults.append(Fault(path="trainer.devices", what=what, remedy=remedy))
    return Devices(accelerator="cpu", devices=count, nproc=count), faults


def _on_gpu(wanted: int | list[int] | None, machine: Machine) -> tuple[Devices, list[Fault]]:
    have, faults = machine.gpus, []
    if have == 0:
        what = "a GPU is requested, but this machine has none."
        remedy = "Set trainer.accelerator=auto or cpu."
        faults.append(Fault(path="trainer.accelerator", what=what, remedy=remedy))
    elif have is not None and isinstance(wanted, int) and wanted > have:
        what = f"{wanted} GPUs requested, but this machine has {have}."
        remedy = f"Use at most {have}, or set trainer.accelerator=cpu."
        faults.append(Fault(path="trainer.devices", what=what, remedy=remedy))
    elif have is not None and isinstance(wanted, list):
        beyond = [d for d in wanted if not 0 <= d < have]
        if beyond:
            what = f"there is no GPU {beyond[0]}: this machine has {have}."
            remedy = f"GPUs are numbered 0 to {have - 1}."
            faults.append(Fault(path="trainer.devices", what=what, remedy=remedy))
    devices = wanted or have or 1
    nproc = len(devices) if isinstance(devices, list) else devices
    return Devices(accelerator="gpu", devices=devices, nproc=nproc), faults
