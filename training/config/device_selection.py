"""Selection of the devices of a run: how many ranks, on which accelerator. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ltui.training.config.node_environment import NodeEnvironment
from ltui.training.config.yaml_document import Fault, format_value

RANKS_PER_CORE = 4
"""Number of CPU ranks per core above which the configuration is rejected."""
_GPU = ("gpu", "cuda")
_DEVICES = re.compile(r"\s*(-1|\d+(\s*,\s*\d+)*)\s*,?\s*")
_FREE = re.compile(r"free(?::0*([1-9]\d*))?")


class Machine(Struct, frozen=True, kw_only=True):
    """Resources of this machine. None means unknown; then nothing is checked against the value."""

    gpus: int | None = None
    cores: int | None = None
    node: NodeEnvironment | None = None
    """Position of this machine among several nodes."""


UNKNOWN_MACHINE = Machine()
"""A machine with unknown resources."""


class Devices(Struct, frozen=True, kw_only=True):
    """Selected devices: ``accelerator`` and ``devices`` for the Trainer, and ``nproc`` ranks."""

    accelerator: str
    devices: int | list[int]
    nproc: int
    gpus: str | None = None
    """``free:2`` if the run waits until two GPUs are free and then uses these."""


def choose_devices(
    trainer: Mapping[str, Any], machine: Machine, cpu_ranks: int
) -> tuple[Devices, list[Fault]]:
    """Select devices for ``trainer.accelerator`` and ``trainer.devices``; also return the errors.

    If ``devices`` is ``auto``, all GPUs are used, or ``cpu_ranks`` ranks on the CPU if there are
    none. An accelerator that is neither CPU nor GPU is left to Lightning.
    """
    accelerator = trainer.get("accelerator", "auto")
    devices = trainer.get("devices", "auto")
    if (free := free_count(devices)) is not None:
        return _select_free_gpus(free, str(accelerator), machine)
    requested: int | list[int] | None = None
    faults: list[Fault] = []
    try:
        requested = parse_devices(devices)
    except ValueError as error:
        faults = [Fault(path="trainer.devices", what=str(error))]
    if accelerator == "cpu" or (accelerator == "auto" and not machine.gpus):
        chosen, other_faults = _select_cpu(requested, machine, cpu_ranks, accelerator)
    elif accelerator == "auto" or accelerator in _GPU:
        chosen, other_faults = _select_gpus(requested, machine)
    else:
        nproc = len(requested) if isinstance(requested, list) else requested or 1
        devices = requested or 1
        chosen = Devices(accelerator=str(accelerator), devices=devices, nproc=nproc)
        other_faults = []
    return chosen, faults or other_faults


def free_count(devices: Any) -> int | None:
    """Return the number of GPUs that ``free:2`` requests; None for any other value."""
    match = _FREE.fullmatch(devices.strip()) if isinstance(devices, str) else None
    return max(1, int(match[1] or 1)) if match else None


def _select_free_gpus(
    count: int, accelerator: str, machine: Machine
) -> tuple[Devices, list[Fault]]:
    chosen = Devices(accelerator="gpu", devices=count, nproc=count, gpus=f"free:{count}")
    if accelerator not in ("auto", *_GPU):
        text = f"free:{count} requests GPUs, but trainer.accelerator is {accelerator}."
        remedy = f"Set trainer.devices={count}, or trainer.accelerator=gpu."
        return chosen, [Fault(path="trainer.devices", what=text, remedy=remedy)]
    faults = _select_gpus(count, machine)[1]
    return chosen, faults


def parse_devices(value: Any) -> int | list[int] | None:
    """Return the devices that ``trainer.devices`` requests; None for ``auto`` and for all (-1).

    Raise ``ValueError`` with what is wrong.
    """
    if value == "auto":
        return None
    devices = value
    if isinstance(value, str):
        if not _DEVICES.fullmatch(value):
            raise ValueError(
                "must be auto, a number of devices, a list of devices such as 0,1, or free:2 for "
                f"two free GPUs (got {format_value(value)})."
            )
        numbers = [int(part) for part in value.split(",") if part.strip()]
        devices = numbers if "," in value else numbers[0]
    if isinstance(devices, list):
        if not devices or not all(type(d) is int and d >= 0 for d in devices):
            what = f"must be a list of device numbers, 0 or more (got {format_value(value)})."
            raise ValueError(what)
        if len(set(devices)) < len(devices):
            raise ValueError("the list contains a device twice.")
        return devices
    if devices == 0:
        raise ValueError("must be at least 1: a run needs a device.")
    return devices if type(devices) is int and devices > 0 else None


def _select_cpu(
    requested: int | list[int] | None, machine: Machine, cpu_ranks: int, accelerator: str
) -> tuple[Devices, list[Fault]]:
    faults: list[Fault] = []
    if isinstance(requested, list):
        if accelerator == "auto":
            text = "GPUs are listed, but this machine has none."
        else:
            text = "CPU ranks are given as a number, not as a list."
        remedy = f"Set trainer.devices={max(1, len(requested))}."
        faults.append(Fault(path="trainer.devices", what=text, remedy=remedy))
        requested = max(1, len(requested))
    count = requested or max(1, cpu_ranks)
    maximum = RANKS_PER_CORE * machine.cores if machine.cores else None
    if maximum is not None and count > maximum:
        text = f"{count} ranks are too many for {machine.cores} CPU cores."
        remedy = f"Use at most {maximum}."
        if accelerator == "auto" and machine.gpus == 0:
            resources = f"no GPU and {machine.cores} CPU cores"
            text = f"{count} devices requested, but this machine has {resources}."
            remedy = f"Use at most {maximum} ranks on the CPU."
        faults.append(Fault(path="trainer.devices", what=text, remedy=remedy))
    return Devices(accelerator="cpu", devices=count, nproc=count), faults


def _select_gpus(
    requested: int | list[int] | None, machine: Machine
) -> tuple[Devices, list[Fault]]:
    available, faults = machine.gpus, []
    if available == 0:
        text = "a GPU is requested, but this machine has none."
        remedy = "Set trainer.accelerator=auto or cpu."
        faults.append(Fault(path="trainer.accelerator", what=text, remedy=remedy))
    elif available is not None and isinstance(requested, int) and requested > available:
        text = f"{requested} GPUs requested, but this machine has {available}."
        remedy = f"Use at most {available}, or set trainer.accelerator=cpu."
        faults.append(Fault(path="trainer.devices", what=text, remedy=remedy))
    elif available is not None and isinstance(requested, list):
        beyond = [d for d in requested if not 0 <= d < available]
        if beyond:
            text = f"there is no GPU {beyond[0]}: this machine has {available}."
            remedy = f"GPUs are numbered 0 to {available - 1}."
            faults.append(Fault(path="trainer.devices", what=text, remedy=remedy))
    devices = requested or available or 1
    nproc = len(devices) if isinstance(devices, list) else devices
    return Devices(accelerator="gpu", devices=devices, nproc=nproc), faults
