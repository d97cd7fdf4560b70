"""Preflight of a configuration: the checks that need no interpreter, and the choice of devices.

``app/launch/build_spec.py`` adds the checks in the interpreter that would train. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ltui.training.config.device_selection import UNKNOWN_MACHINE, Machine, choose_devices
from ltui.training.config.node_environment import NUM_NODES, choose_nodes, launcher_count
from ltui.training.config.overrides import apply_overrides, overridden_paths
from ltui.training.config.run_spec import Nodes
from ltui.training.config.structure_check import find_faults, locate_fault
from ltui.training.config.yaml_document import Document, resolve
from ltui.training.problem import ProblemError


class CheckedConfiguration(Struct, frozen=True, kw_only=True):
    """A configuration without errors, for one machine."""

    document: Document
    """Interpolations are resolved; ``trainer.accelerator`` and ``devices`` are those selected."""
    nproc: int
    """Number of ranks on this machine."""
    nodes: Nodes | None
    gpus: str | None
    """``free:2`` if the run waits until two GPUs are free."""


def preflight(
    document: Document,
    overrides: Sequence[str],
    where: str,
    *,
    lines: Mapping[str, int],
    machine: Machine = UNKNOWN_MACHINE,
    cpu_ranks: int,
) -> CheckedConfiguration:
    """Apply the overrides and check the configuration. Raise ``ProblemError`` with all errors.

    ``where`` and ``lines`` are the name of the file and the line of each of its dotted paths.
    """
    document = apply_overrides(document, overrides)
    keys = overridden_paths(overrides)
    if NUM_NODES not in keys:
        document = _with_nodes_of_launcher(document, machine)
    if faults := find_faults(document, machine=machine, cpu_ranks=cpu_ranks):
        raise ProblemError(*(locate_fault(fault, where, lines, keys) for fault in faults))
    document, _ = resolve(document)
    trainer = dict(document.get("trainer") or {})
    devices, _ = choose_devices(trainer, machine, cpu_ranks)
    document["trainer"] = {
        **trainer,
        "accelerator": devices.accelerator,
        "devices": devices.devices,
    }
    return CheckedConfiguration(
        document=document,
        nproc=devices.nproc,
        nodes=choose_nodes(trainer, machine.node)[0],
        gpus=devices.gpus,
    )


def _with_nodes_of_launcher(document: Document, machine: Machine) -> Document:
    """Return the configuration with the number of nodes on which a launcher runs this command.

    A file that names one node means one machine, as long as nobody starts it on several.
    """
    count, trainer = launcher_count(machine.node), document.get("trainer")
    if count is None or count < 2 or not isinstance(trainer or {}, Mapping):
        return document
    trainer = trainer or {}
    if trainer.get("num_nodes", 1) != 1:
        return document
    return {**document, "trainer": {**trainer, "num_nodes": count}}
