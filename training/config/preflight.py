"""Preflight of a configuration: ``--set``, the checks without an interpreter, the devices.

``app/launch/build_spec.py`` adds the checks in the interpreter that would train. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ltui.training.config.device_selection import UNKNOWN_MACHINE, Machine, choose_devices
from ltui.training.config.node_environment import NUM_NODES, choose_nodes, launcher_count
from ltui.training.config.run_spec import Nodes
from ltui.training.config.structure_check import (
    TOP_LEVEL,
    TRAINER_ARGUMENTS,
    closest_match,
    find_faults,
    key_fault,
    locate_fault,
)
from ltui.training.config.yaml_document import (
    Document,
    iterate_values,
    parse_value,
    resolve,
    with_value,
)
from ltui.training.problem import Problem, ProblemError


def split_override(override: str) -> tuple[str, Any]:
    """Split ``trainer.devices=4`` into a dotted path and a YAML value. Raise ``ProblemError``."""
    key, sign, text = override.partition("=")
    key = key.strip()
    if not sign or not key or "" in key.split("."):
        raise ProblemError.of(
            where=f"--set {override}",
            what="must have the form KEY=VALUE.",
            remedy="For example: --set trainer.max_epochs=3",
        )
    try:
        return key, parse_value(text)
    except ValueError as error:
        message = f"the value is invalid YAML: {error}."
        raise ProblemError.of(
            where=f"--set {key}", what=message, remedy="Quote the value: --set 'a.b=\"text\"'"
        ) from error


def overridden_paths(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the dotted paths that valid overrides set."""
    return tuple(o.partition("=")[0].strip() for o in overrides if "=" in o)


def apply_overrides(document: Mapping[str, Any], overrides: Iterable[str]) -> Document:
    """Return a copy of ``document`` with each ``KEY=VALUE`` set, in order.

    Raise ``ProblemError`` with all overrides that are malformed or have a key that cannot exist.
    The problem names the most similar valid key.
    """
    result = dict(document)
    problems: list[Problem] = []
    for override in overrides:
        try:
            key, value = split_override(override)
        except ProblemError as error:
            problems += error.problems
            continue
        unknown = _unknown_key(key, document)
        if unknown is not None:
            problems.append(unknown)
            continue
        try:
            result = with_value(result, key, value)
        except KeyError as error:
            text = f"`{error.args[0]}` is not a mapping, so it has no keys that can be set."
            problems.append(Problem(where=f"--set {key}", what=text))
    if problems:
        raise ProblemError(*problems)
    return result


def _unknown_key(key: str, document: Mapping[str, Any]) -> Problem | None:
    fault = key_fault(key)
    if fault is None:
        return None
    suggestion = _suggestion(key, document)
    remedy = f"Did you mean `{suggestion}`?" if suggestion else fault.remedy
    return Problem(where=f"--set {key}", what=fault.what, remedy=remedy)


def _suggestion(key: str, document: Mapping[str, Any]) -> str | None:
    """Return the path that was probably meant.

    It is the only one with the same last name, or else the most similar one.
    """
    paths = [path for path, _ in iterate_values(document)]
    paths += [f"trainer.{name}" for name in TRAINER_ARGUMENTS] + list(TOP_LEVEL)
    paths = [path for path in dict.fromkeys(paths) if not path.startswith("ltui")]
    same_name = [path for path in paths if path.rpartition(".")[2] == key.rpartition(".")[2]]
    if len(same_name) == 1:
        return same_name[0]
    return closest_match(key, same_name or paths, cutoff=0.6)


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
